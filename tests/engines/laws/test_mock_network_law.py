"""Laws of shared links."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.mock_engine.network import Network
from kvrouter.kernel.topology.link_table import Link
from tests.testing.mock_engine import zone, zone_links

BANDWIDTH = 1_000.0
STARTS = st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 5_000)), min_size=1, max_size=12).map(sorted)


def run(starts: list[tuple[float, int]], every_s: float | None = None) -> dict[int, float]:
    """Start all over one link; return when each ended, looking only at events or every so often."""
    network = Network(zone_links(same=Link(0.0, BANDWIDTH)))
    ended: dict[int, float] = {}
    now = 0.0
    for index, (at, kv_bytes) in enumerate(starts):
        while every_s is not None and now + every_s < at:
            now += every_s
            ended.update({int(each.key): each.at_s for each in network.advance(now)})
        ended.update({int(each.key): each.at_s for each in network.advance(at)})
        network.start(at, str(index), zone("a"), zone("a"), kv_bytes)
    ended.update({int(each.key): each.at_s for each in network.advance(1e9)})
    return ended


@given(STARTS)
def test_busy_link_uses_its_full_bandwidth(starts: list[tuple[float, int]]) -> None:
    """The last end is when a single queue of the same bytes would be empty."""
    busy_until = 0.0
    for at, kv_bytes in starts:
        busy_until = max(busy_until, at) + kv_bytes / BANDWIDTH
    ended = run(starts)
    assert len(ended) == len(starts)
    assert abs(max(ended.values()) - busy_until) < 1e-6


@given(STARTS)
def test_transfer_time_is_between_alone_and_shared_by_all(starts: list[tuple[float, int]]) -> None:
    for index, time in run(starts).items():
        at, kv_bytes = starts[index]
        assert time >= at + kv_bytes / BANDWIDTH - 1e-6
        assert time <= at + len(starts) * kv_bytes / BANDWIDTH + 1e-6


@given(STARTS, st.floats(0.1, 5.0))
def test_polling_interval_does_not_change_transfer_times(
    starts: list[tuple[float, int]], every_s: float
) -> None:
    rarely, often = run(starts), run(starts, every_s)
    assert all(abs(rarely[index] - often[index]) < 1e-6 for index in rarely)


@given(STARTS, st.data())
def test_smaller_of_two_transfers_started_together_ends_first(
    starts: list[tuple[float, int]], data: st.DataObject
) -> None:
    at, kv_bytes = data.draw(st.sampled_from(starts))
    ended = run(sorted([*starts, (at, kv_bytes + 1_000)]))
    pairs = sorted([*starts, (at, kv_bytes + 1_000)])
    assert ended[pairs.index((at, kv_bytes))] <= ended[pairs.index((at, kv_bytes + 1_000))]


@given(st.integers(1, 8), st.integers(1, 5_000))
def test_cancelled_transfers_free_their_share(n_cancelled: int, kv_bytes: int) -> None:
    network = Network(zone_links(same=Link(0.0, BANDWIDTH)))
    for index in range(n_cancelled + 1):
        network.start(0.0, str(index), zone("a"), zone("a"), kv_bytes)
    half_s = 0.5 * kv_bytes * (n_cancelled + 1) / BANDWIDTH
    assert network.advance(half_s) == []
    for index in range(n_cancelled):
        network.cancel(half_s, str(index))
    (ended,) = network.advance(1e9)
    assert abs(ended.at_s - (half_s + 0.5 * kv_bytes / BANDWIDTH)) < 1e-6
