"""What the placer learns of how fast links are."""

from random import Random

import pytest

from kvrouter.kernel.placement.link_speeds import FORGET_S, LearnedLinks, TransferSample
from kvrouter.kernel.topology.link_table import (
    ACROSS_LINK,
    UNKNOWN_KIND,
    Link,
    LinkKind,
    LinkPace,
    LinkState,
    LinkTable,
    SharedLink,
)
from tests.testing.placement_events import RecordedPlacementEvents

TABLE = Link(1e-3, 10e9)
WITHIN = LinkKind("zone", True)


def within(zone: str) -> SharedLink:
    return SharedLink((("zone", zone),), zone)


def between(one: str, other: str) -> SharedLink:
    return SharedLink((("zone", one),), other)


class Way:
    """Transfers that take as long as a test says, one after another."""

    def __init__(self, table: Link = TABLE, seed: int = 0, *, links: LinkTable | None = None) -> None:
        self.table, self.rng = table, Random(seed)
        self.state, self.events = LinkState(), RecordedPlacementEvents()
        self.learned = LearnedLinks(self.state, self.events)
        self.learned.use(links)
        self.now_s = 100.0

    def send(
        self,
        link: SharedLink | None,
        slowness: float,
        *,
        extra_s: float = 0.0,
        n: int = 1,
        plain_s: float | None = None,
    ) -> None:
        for _ in range(n):
            plain = self.rng.uniform(0.02, 0.4) if plain_s is None else plain_s
            took = (plain * slowness + extra_s) * self.rng.uniform(0.95, 1.05)
            self.now_s += took
            self.learned.note(TransferSample(link, self.table, self.now_s - took, self.now_s, plain, took))
            self.refresh()

    def late(self, link: SharedLink, took: float, plain: float = 0.1) -> TransferSample:
        return TransferSample(link, self.table, self.now_s - took, self.now_s, plain, took)

    def refresh(self, *on_the_way: TransferSample) -> None:
        self.learned.refresh(on_the_way, now_s=self.now_s)

    def slowness(self, link: SharedLink | None) -> float:
        paces = dict(self.state.paces())
        own = None if link is None else paces.get(link)
        kind = UNKNOWN_KIND if link is None else link.kind
        return (own or self.state.pace_of_kind(kind)).slowness


def test_links_as_fast_as_their_table_keep_slowness_1_and_are_alike() -> None:
    way = Way()
    for zone in "ab":
        way.send(within(zone), 1.0, n=40)
    way.send(between("a", "b"), 1.1, n=40)
    assert [way.slowness(link) for link in (within("a"), between("a", "b"))] == [1.0, 1.0]
    assert way.learned.are_alike
    assert way.events.links == []


@pytest.mark.parametrize("slowness", [0.05, 0.5, 3.0, 20.0])
def test_latency_and_bandwidth_are_learned_apart_with_an_interval(slowness: float) -> None:
    way = Way(ACROSS_LINK)
    way.send(between("a", "b"), slowness, extra_s=0.01, n=60)
    reading, *_ = way.learned.readings()
    assert reading.name == "between two values of zone"
    assert reading.slowness == pytest.approx(slowness, rel=0.1)
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low < slowness < reading.high
    assert reading.latency_s == pytest.approx(ACROSS_LINK.latency_s + 0.01, abs=0.01)
    bandwidth = ACROSS_LINK.bandwidth_bytes_per_s / slowness
    assert reading.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.1)
    assert reading.transfers == 60


def test_a_constant_time_per_transfer_does_not_count_as_bandwidth() -> None:
    """Real engines on busy CPUs take a tenth of a second from the end of a prefill to the first token."""
    way = Way()
    for _ in range(20):
        for plain_s in (0.01, 0.015, 0.022, 0.03, 0.037):
            way.send(between("a", "b"), 1.0, extra_s=0.09, plain_s=plain_s)
    reading, *_ = way.learned.readings()
    assert reading.slowness == 1.0
    assert reading.latency_s == pytest.approx(TABLE.latency_s + 0.09, abs=0.02)
    assert not reading.is_slow


def test_outlier_transfers_hardly_change_a_links_slowness() -> None:
    way = Way()
    for _ in range(12):
        way.send(within("a"), 60.0)
        way.send(within("a"), 4.0, n=3)
        assert way.slowness(within("a")) < 4.4
    assert way.slowness(within("a")) == pytest.approx(4.0, rel=0.1)


def test_a_late_transfer_counts_a_third_until_a_transfer_is_on_time() -> None:
    way = Way()
    for zone in "ab":
        way.send(within(zone), 1.0, n=20)
    way.send(within("a"), 10.0, plain_s=0.3)
    assert way.slowness(within("a")) == pytest.approx(10 ** (1 / 3), rel=0.1)
    assert way.slowness(within("b")) == 1.0
    way.send(within("a"), 10.0, plain_s=0.3)
    assert way.slowness(within("a")) == pytest.approx(10 ** (2 / 3), rel=0.1)
    assert way.events.links == [], "three of them say so"
    way.now_s += FORGET_S
    way.refresh()
    assert way.slowness(within("a")) == pytest.approx(10 ** (1 / 3), rel=0.1)
    way.send(within("a"), 1.0, plain_s=0.3)
    assert way.slowness(within("a")) == 1.0


def test_unmeasured_links_have_their_kinds_pace_and_other_kinds_slowness() -> None:
    way = Way()
    way.send(within("a"), 0.2, n=10)
    assert way.slowness(within("b")) == pytest.approx(0.2, rel=0.1)
    assert way.slowness(between("a", "b")) == 1.0
    slow = Way()
    slow.send(within("a"), 8.0, n=10)
    assert slow.slowness(between("a", "b")) == pytest.approx(8.0, rel=0.1)
    slow.send(between("a", "b"), 1.0, n=3)
    assert slow.slowness(between("a", "b")) == 1.0


def test_short_or_few_transfers_do_not_change_slowness() -> None:
    way = Way()
    way.send(within("a"), 30.0, n=20, plain_s=0.001)
    way.send(within("a"), 30.0, n=2, plain_s=0.01)
    assert way.slowness(within("a")) == 1.0


def test_a_10_times_slower_link_is_noticed_after_3_transfers_and_reported_once() -> None:
    way = Way()
    for zone in "abc":
        way.send(within(zone), 1.0, n=20)
    way.send(within("a"), 10.0, n=3)
    assert way.slowness(within("a")) == pytest.approx(10.0, rel=0.1)
    assert way.slowness(within("b")) == 1.0
    assert not way.learned.are_alike
    way.send(within("a"), 10.0, n=10)
    assert [(name, is_slow) for name, is_slow, _ in way.events.links] == [("zone=a to zone=a", True)]
    assert way.learned.readings()[-1].is_slow
    way.send(within("a"), 1.0, n=8)
    assert way.slowness(within("a")) == 1.0
    ((name, is_slow, relative),) = way.events.links[1:]
    assert (name, is_slow) == ("zone=a to zone=a", False)
    assert relative == pytest.approx(1.0, abs=0.2)


def test_late_transfers_count_until_they_end() -> None:
    way = Way()
    way.send(within("a"), 1.0, n=20)
    way.send(within("b"), 1.0, n=20)
    late = [way.late(within("a"), took) for took in (0.9, 1.1)]
    for _ in range(3):
        way.refresh(*late)
        assert way.slowness(within("a")) == pytest.approx(10.0)
    assert way.slowness(within("b")) == 1.0
    assert [is_slow for _, is_slow, _ in way.events.links] == [True]
    way.refresh()
    assert way.slowness(within("a")) == 1.0
    way.refresh(way.late(within("a"), 0.2))
    assert way.slowness(within("a")) == 1.0
    way.refresh(way.late(within("a"), 0.9))
    assert way.slowness(within("a")) == pytest.approx(9.0)


def test_a_link_with_late_arrivals_recovers_after_the_forget_time() -> None:
    way = Way()
    for zone in "ab":
        way.send(within(zone), 1.0, n=20)
    way.refresh(way.late(within("a"), 0.9), way.late(within("a"), 0.6))
    way.send(within("a"), 10.0, n=2, plain_s=0.1)
    way.refresh()
    assert [is_slow for _, is_slow, _ in way.events.links] == [True]
    way.now_s += FORGET_S + 1.0
    way.refresh()
    assert [is_slow for _, is_slow, _ in way.events.links] == [True, False]


def test_a_link_with_late_arrivals_recovers_by_a_transfer_on_time() -> None:
    way = Way()
    for zone in "ab":
        way.send(within(zone), 1.0, n=20)
    way.refresh(way.late(within("a"), 0.9), way.late(within("a"), 0.6))
    way.send(within("a"), 10.0, n=1, plain_s=0.1)
    assert [is_slow for _, is_slow, _ in way.events.links] == [True]
    way.send(within("a"), 1.0)
    assert [is_slow for _, is_slow, _ in way.events.links] == [True, False]


def test_a_slow_fleet_is_noticed_before_its_transfers_end() -> None:
    way = Way()
    for zone in "abcdef":
        way.send(within(zone), 1.0, n=8)
    way.refresh(*(way.late(within(zone), 1.0) for zone in "abcd"))
    assert way.slowness(within("f")) == pytest.approx(10.0)
    assert ("within one zone", True) in [(name, is_slow) for name, is_slow, _ in way.events.links]


def test_a_slow_links_slowness_fades_without_transfers() -> None:
    way = Way()
    for zone in "ab":
        way.send(within(zone), 1.0, n=20)
    way.send(within("a"), 16.0, n=4)
    before = way.slowness(within("a"))
    way.now_s += FORGET_S + 1.0
    way.refresh()
    assert way.slowness(within("a")) == pytest.approx(before**0.5, rel=0.05)
    way.now_s += 20 * FORGET_S
    way.refresh()
    assert way.slowness(within("a")) == 1.0
    assert [is_slow for _, is_slow, _ in way.events.links] == [True, False]


def test_a_slow_kind_fades_to_the_other_kinds_and_with_them_to_the_table() -> None:
    way = Way()
    way.send(within("a"), 3.0, n=20)
    way.send(between("a", "b"), 8.0, n=20)
    for half_lives in range(1, 12):
        way.now_s += FORGET_S
        way.send(within("a"), 3.0, n=2)
        faded = 3.0 * (8.0 / 3.0) ** (0.5**half_lives)
        assert way.slowness(between("a", "b")) == pytest.approx(faded, rel=0.1)
        assert way.slowness(within("a")) == pytest.approx(3.0, rel=0.1), "it is no faster than was measured"
    way.now_s += 20 * FORGET_S
    way.refresh()
    assert [way.slowness(link) for link in (between("a", "b"), within("a"))] == pytest.approx(
        [1.0, 1.0], rel=0.01
    )


def test_links_between_unknown_places_are_learned_together() -> None:
    way = Way(ACROSS_LINK)
    way.send(None, 0.1, n=10)
    assert way.slowness(None) == pytest.approx(0.1, rel=0.1)
    assert way.learned.readings()[0].name == "between unknown places"


def test_the_reader_of_a_link_state_hears_each_pace_change_once() -> None:
    heard: list[object] = []

    class Reader:
        def load_changed(self, link: SharedLink, load: object) -> None:
            heard.append((link, load))

        def pace_changed(self, link_or_kind: SharedLink | LinkKind, pace: LinkPace | None) -> None:
            heard.append((link_or_kind, pace))

    state = LinkState()
    state.reader = Reader()
    state.set_pace(WITHIN, LinkPace(2.0, 0.0))
    state.set_pace(WITHIN, LinkPace(2.0, 0.0))
    state.set_pace(within("a"), None)
    state.set_pace(WITHIN, None)
    assert heard == [(WITHIN, LinkPace(2.0, 0.0)), (WITHIN, None)]


def test_transfers_late_by_a_hanging_rank_do_not_slow_their_link() -> None:
    way = Way()
    way.send(within("a"), 1.0, n=20)
    began_s = way.now_s
    for _ in range(8):
        way.send(within("a"), 1.0)
        hung = [TransferSample(within("a"), TABLE, began_s, way.now_s, 0.1, way.now_s - began_s)] * 2
        way.refresh(*hung)
    assert way.slowness(within("a")) == 1.0
    assert way.events.links == []


def test_forgetting_links_drops_measurements_and_ends_slow_links() -> None:
    way = Way()
    for zone in "abc":
        way.send(within(zone), 1.0, n=8)
    way.send(within("a"), 10.0, n=6)
    assert way.slowness(within("a")) > 5.0
    assert [is_slow for _, is_slow, _ in way.events.links] == [True]
    way.learned.forget()
    assert [way.slowness(within(zone)) for zone in "abc"] == [1.0, 1.0, 1.0]
    assert [is_slow for _, is_slow, _ in way.events.links] == [True, False]
    assert way.learned.readings() == []
    assert list(way.state.paces()) == []
    way.send(within("a"), 3.0, n=8)
    assert way.slowness(within("a")) == pytest.approx(3.0, rel=0.1)


SLOWER = Link(0.01, 1e9)
ZONES = LinkTable(by_level={"zone": SLOWER}, otherwise=SLOWER, assumes_otherwise=True)


@pytest.mark.parametrize(
    ("links", "link", "is_stated"),
    [
        (LinkTable(), between("a", "b"), True),
        (LinkTable(assumes_otherwise=True), between("a", "b"), False),
        (ZONES, within("a"), True),
        (ZONES, between("a", "b"), False),
        (ZONES, None, False),
        (LinkTable(pairs={("zone", "b", "a"): SLOWER}, assumes_otherwise=True), between("a", "b"), True),
        (LinkTable(pairs={("zone", "b", "a"): SLOWER}, assumes_otherwise=True), between("a", "c"), False),
    ],
)
@pytest.mark.parametrize("table", [ACROSS_LINK, SLOWER])
def test_only_a_link_that_is_stated_counts_as_slow_from_its_first_transfers(
    links: LinkTable, link: SharedLink | None, is_stated: bool, table: Link
) -> None:
    way = Way(table, links=links)
    way.send(link, 8.0, n=10)
    assert [is_slow for _, is_slow, _ in way.events.links] == [True] * is_stated
