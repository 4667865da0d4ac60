import pytest

from kvrouter.engines.mock_engine.mock_links import DomainPair
from kvrouter.engines.mock_engine.network import Network
from kvrouter.kernel.topology.link_table import Link
from tests.testing.mock_engine import zone, zone_links

LINKS = zone_links(
    same=Link(0.0, 100.0),
    cross=Link(1.0, 10.0),
    pairs={("a", "c"): Link(0.0, 50.0), ("c", "c"): Link(0.0, 1.0)},
)


def drain(network: Network) -> list[tuple[float, str]]:
    return [(round(arrived.at_s, 9), arrived.key) for arrived in network.advance(1e9)]


def test_lone_transfer_takes_latency_plus_bytes_over_bandwidth() -> None:
    network = Network(LINKS)
    network.start(5.0, "x", zone("a"), zone("b"), 20)
    assert drain(network) == [(8.0, "x")]


@pytest.mark.parametrize(
    ("src", "dst", "seconds"),
    [("a", "a", 1.0), ("a", "b", 11.0), ("a", "c", 2.0), ("c", "a", 2.0), ("c", "c", 100.0)],
)
def test_the_link_depends_on_both_domains(src: str, dst: str, seconds: float) -> None:
    network = Network(LINKS)
    network.start(0.0, "x", zone(src), zone(dst), 100)
    assert drain(network) == [(seconds, "x")]


def test_n_equal_transfers_take_n_times_as_long() -> None:
    network = Network(LINKS)
    for n in range(4):
        network.start(0.0, f"x{n}", zone("a"), zone("a"), 100)
    assert [at for at, _ in drain(network)] == [4.0] * 4


def test_later_transfer_shares_the_link_from_its_start() -> None:
    network = Network(LINKS)
    network.start(0.0, "first", zone("a"), zone("a"), 100)
    assert network.advance(0.5) == []
    network.start(0.5, "second", zone("a"), zone("a"), 100)
    # 50 bytes each until 1.5, then the second moves alone.
    assert drain(network) == [(1.5, "first"), (2.0, "second")]


def test_a_cancelled_transfer_frees_its_share() -> None:
    network = Network(LINKS)
    network.start(0.0, "kept", zone("a"), zone("a"), 100)
    network.start(0.0, "dropped", zone("a"), zone("a"), 100)
    network.advance(1.0)
    assert network.cancel(1.0, "dropped")
    assert not network.cancel(1.0, "dropped")
    assert drain(network) == [(1.5, "kept")]
    assert len(network) == 0


def test_transfers_of_other_directions_or_pairs_share_no_link() -> None:
    network = Network(LINKS)
    network.start(0.0, "ab", zone("a"), zone("b"), 10)
    network.start(0.0, "ba", zone("b"), zone("a"), 10)
    network.start(0.0, "aa", zone("a"), zone("a"), 10)
    assert drain(network) == [(0.1, "aa"), (2.0, "ab"), (2.0, "ba")]


def test_transfer_of_no_bytes_takes_the_latency() -> None:
    network = Network(LINKS)
    network.start(0.0, "x", zone("a"), zone("b"), 0)
    assert drain(network) == [(1.0, "x")]


def test_transfer_cancelled_before_its_first_byte_is_removed() -> None:
    network = Network(LINKS)
    network.start(0.0, "x", zone("a"), zone("b"), 10)
    network.cancel(0.5, "x")
    assert network.next_time() is None


def test_carried_transfers_and_bytes_are_counted() -> None:
    network = Network(LINKS)
    network.start(0.0, "x", zone("a"), zone("b"), 10)
    network.start(0.0, "y", zone("a"), zone("b"), 10)
    network.cancel(0.1, "y")
    drain(network)
    carried = network.carried()[DomainPair("a", "b")]
    assert (carried.transfers, carried.arrived_bytes) == (2, 10)


def test_key_already_in_flight_is_refused() -> None:
    network = Network(LINKS)
    network.start(0.0, "x", zone("a"), zone("b"), 10)
    with pytest.raises(ValueError, match="in flight already"):
        network.start(0.0, "x", zone("a"), zone("b"), 10)
