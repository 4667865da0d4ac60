"""Which link a transfer goes over, who shares it, and what a change does to those on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import WorkerId
from kvrouter.engines.mock_engine.mock_links import LinkChange, LinkName, Links, Place
from kvrouter.engines.mock_engine.network import Network
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link, LinkTable
from tests.testing.mock_engine import zone, zone_links

LEVELS = ("zone", "rack", "host")
ZONE, RACK, ACROSS = Link(0.0, 100.0), Link(0.0, 1_000.0), Link(1.0, 10.0)
LINKS = Links(
    table=LinkTable(by_level={"zone": ZONE, "rack": RACK}, otherwise=ACROSS),
    levels=LEVELS,
    report_level="zone",
)
PLACES = st.builds(
    Place,
    st.dictionaries(st.sampled_from(LEVELS), st.sampled_from(["1", "2"])),
    st.integers(1, 3).map(WorkerId),
)
CHANGES = st.builds(
    LinkChange,
    level=st.just("zone"),
    between=st.sampled_from([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]),
    bandwidth_factor=st.sampled_from([None, 1.0]),
    latency_factor=st.sampled_from([None, 1.0]),
)


def at(
    zone: str | None = None, rack: str | None = None, host: str | None = None, worker_id: int = 1
) -> Place:
    said = {"zone": zone, "rack": rack, "host": host}
    return Place({level: value for level, value in said.items() if value is not None}, WorkerId(worker_id))


def drain(network: Network) -> list[tuple[float, str]]:
    return [(round(arrived.at_s, 9), arrived.key) for arrived in network.advance(1e9)]


@pytest.mark.parametrize(
    ("src", "dst", "link", "name"),
    [
        # hosts of one rack have no link of their own: the rack's
        (at("a", "1", "x"), at("a", "1", "x"), RACK, ("rack", ("a", "1"), ("a", "1"))),
        (at("a", "1", "x"), at("a", "1", "y"), RACK, ("rack", ("a", "1"), ("a", "1"))),
        (at("a", "1"), at("a", "2"), ZONE, ("zone", ("a",), ("a",))),
        # rack 1 of another zone is another rack
        (at("a", "1"), at("b", "1"), ACROSS, ("zone", ("a",), ("b",))),
        # neither says a place: they share a link with nobody
        (at(worker_id=3), at(worker_id=4), ACROSS, (None, ("3",), ("4",))),
        (at(worker_id=3), at("a", worker_id=4), ACROSS, (None, ("3",), ("4",))),
        # nothing but what both know is compared
        (at(rack="1", worker_id=3), at("a", "2", worker_id=4), ACROSS, ("rack", ("", "1"), ("a", "2"))),
    ],
)
def test_narrowest_shared_level_decides_the_link_and_its_sharing(
    src: Place, dst: Place, link: Link, name: tuple[str | None, tuple[str, ...], tuple[str, ...]]
) -> None:
    assert LINKS.shared(src, dst) == (LinkName(*name), link)


def test_shared_level_without_a_link_uses_the_link_across() -> None:
    links = Links(table=LinkTable(otherwise=ACROSS), levels=("zone",))
    assert links.shared(at("a"), at("a")) == (LinkName("zone", ("a",), ("a",)), ACROSS)


def test_a_measured_pair_of_a_narrow_level_is_a_link_of_its_own() -> None:
    measured = Link(0.0, 7.0)
    table = LinkTable(by_level={"zone": ZONE}, otherwise=ACROSS, pairs={("rack", "1", "2"): measured})
    links = Links(table=table, levels=LEVELS, report_level="zone")
    assert links.shared(at("a", "2"), at("b", "1")) == (LinkName("rack", ("a", "2"), ("b", "1")), measured)
    assert links.shared(at("a", "2"), at("b", "3"))[0] == LinkName("zone", ("a",), ("b",))


@given(PLACES, PLACES)
def test_mock_transfers_use_the_link_that_decisions_use(src: Place, dst: Place) -> None:
    name, link = LINKS.shared(src, dst)
    assert link == LINKS.table.link(src.domains, dst.domains, LEVELS)
    back, same = LINKS.shared(dst, src)
    assert (back, same) == (LinkName(name.level, name.dst, name.src), link)


def test_racks_of_a_zone_share_its_link_and_each_rack_has_its_own() -> None:
    network = Network(LINKS)
    network.start(0.0, "in a rack", at("a", "1"), at("a", "1"), 1_000)
    network.start(0.0, "between racks", at("a", "1"), at("a", "2"), 100)
    network.start(0.0, "between others", at("a", "3"), at("a", "2"), 100)
    network.start(0.0, "between zones", at("a", "3"), at("b", "3"), 10)
    expected = [(1.0, "in a rack"), (2.0, "between racks"), (2.0, "between others"), (2.0, "between zones")]
    assert drain(network) == expected
    carried = {tuple(pair): (each.transfers, each.arrived_bytes) for pair, each in network.carried().items()}
    assert carried == {("a", "a"): (3, 1_200), ("a", "b"): (1, 10)}


def test_workers_without_a_place_do_not_slow_each_other_down() -> None:
    network = Network(Links())
    for number in range(4):
        src, dst = at(worker_id=number), at(worker_id=number + 10)
        network.start(0.0, f"x{number}", src, dst, int(ACROSS_LINK.bandwidth_bytes_per_s))
    network.start(0.0, "x4", at(worker_id=0), at(worker_id=10), int(ACROSS_LINK.bandwidth_bytes_per_s))
    alone_s, shared_s = 1.0 + ACROSS_LINK.latency_s, 2.0 + ACROSS_LINK.latency_s
    assert {key: at_s for at_s, key in drain(network)} == {
        "x0": shared_s,
        "x1": alone_s,
        "x2": alone_s,
        "x3": alone_s,
        "x4": shared_s,
    }


# Changes


def test_transfer_slows_tenfold_after_bandwidth_falls_to_a_tenth() -> None:
    network = Network(zone_links(same=Link(0.0, 100.0), cross=Link(1.0, 10.0)))
    network.start(0.0, "x", zone("a"), zone("b"), 100)
    network.start(0.0, "other", zone("a"), zone("a"), 1_000)
    assert network.advance(6.0) == []
    network.change(6.0, LinkChange(level="zone", between=("b", "a"), bandwidth_factor=0.1))
    # 50 bytes in 5 s after 1 s of latency, the other 50 at 1 byte a second.
    assert network.next_time() == 10.0
    assert drain(network) == [(10.0, "other"), (56.0, "x")]


def test_later_transfers_use_the_changed_link() -> None:
    network = Network(zone_links(cross=Link(1.0, 10.0)))
    fell = LinkChange(level="zone", between=("a", "b"), bandwidth_factor=0.1, latency_factor=3.0)
    network.change(0.0, fell)
    network.start(0.0, "there", zone("a"), zone("b"), 10)
    network.start(0.0, "back", zone("b"), zone("a"), 10)
    assert drain(network) == [(13.0, "there"), (13.0, "back")]
    network.change(20.0, LinkChange(level="zone", between=("a", "b"), bandwidth_bytes_per_s=5.0))
    network.start(20.0, "half", zone("a"), zone("b"), 10)
    assert drain(network) == [(25.0, "half")]  # 3 s of latency, as before
    network.change(30.0, LinkChange(level="zone", between=("a", "b"), bandwidth_factor=1.0, latency_s=0.0))
    network.start(30.0, "well", zone("a"), zone("b"), 10)
    assert drain(network) == [(31.0, "well")]


def test_latency_change_does_not_affect_a_transfer_that_began() -> None:
    network = Network(zone_links(cross=Link(1.0, 10.0)))
    network.start(0.0, "x", zone("a"), zone("b"), 10)
    network.change(0.5, LinkChange(level="zone", between=("a", "b"), latency_s=100.0))
    assert drain(network) == [(2.0, "x")]


@given(
    starts=st.lists(
        st.tuples(st.floats(0.0, 20.0), st.integers(0, 5_000), st.sampled_from("ab")), min_size=1, max_size=10
    ),
    moments=st.lists(st.tuples(st.floats(0.0, 60.0), CHANGES), max_size=6),
)
def test_link_change_to_the_same_values_changes_no_arrival(
    starts: list[tuple[float, int, str]], moments: list[tuple[float, LinkChange]]
) -> None:
    def run(changes: list[tuple[float, LinkChange]]) -> list[tuple[float, str]]:
        network = Network(zone_links(same=Link(0.3, 700.0), cross=Link(0.7, 300.0)))
        arrived = []
        inputs: list[tuple[float, int, int | LinkChange]] = [
            (at_s, 0, n) for n, (at_s, _, _) in enumerate(starts)
        ]
        inputs += [(at_s, 1 + n, change) for n, (at_s, change) in enumerate(changes)]
        for at_s, _, what in sorted(inputs, key=lambda each: each[:2]):
            arrived += network.advance(at_s)
            if isinstance(what, LinkChange):
                network.change(at_s, what)
            else:
                network.start(at_s, f"x{what}", zone("a"), zone(starts[what][2]), starts[what][1])
        arrived += network.advance(1e9)
        return [(each.at_s, each.key) for each in arrived]

    assert run(moments) == run([])


@given(
    kv_bytes=st.integers(1, 10_000),
    at_share=st.floats(0.01, 0.99),
    factor=st.floats(0.01, 10.0),
)
def test_rest_of_a_transfer_takes_the_time_of_the_new_bandwidth(
    kv_bytes: int, at_share: float, factor: float
) -> None:
    network = Network(zone_links(cross=Link(0.5, 100.0)))
    network.start(0.0, "x", zone("a"), zone("b"), kv_bytes)
    whole_s = kv_bytes / 100.0
    changed_s = 0.5 + at_share * whole_s
    assert network.advance(changed_s) == []
    network.change(changed_s, LinkChange(level="zone", between=("a", "b"), bandwidth_factor=factor))
    ((arrived_s, _),) = [(each.at_s, each.key) for each in network.advance(1e9)]
    assert arrived_s == pytest.approx(changed_s + (1.0 - at_share) * whole_s / factor)
