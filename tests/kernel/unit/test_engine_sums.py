"""Engines' own sums of the KV that they fetched, as a check of what the router sees of links."""

import pytest
from msgspec import structs

from kvrouter.core.ids import RouterId, Slot
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.engine_sums import AGREE, HALF_S, TRANSFERS_MIN, EngineSums
from kvrouter.kernel.placement.transfers import Transfers
from kvrouter.kernel.topology.link_table import Link, LinkKind, LinkPace, LinkTable
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

HERE, ELSEWHERE = Slot(0), Slot(1)
MIN = int(TRANSFERS_MIN)


def sums_of(counted_s: float, seen_s: float, *, n: int = MIN, now_s: float = 0.0) -> EngineSums:
    """Each transfer of 100 MB took so long by the engine, and by the router."""
    sums = EngineSums()
    sums.reported(HERE, transfers=0, kv_bytes=0, seconds=0.0, now_s=now_s)
    for _ in range(n):
        sums.observed(HERE, kv_bytes=1e8, seconds=seen_s, now_s=now_s)
    sums.reported(HERE, transfers=n, kv_bytes=n * 10**8, seconds=n * counted_s, now_s=now_s)
    return sums


@pytest.mark.parametrize(("seen_s", "agree"), [(0.05, True), (0.1, True), (0.19, True), (0.21, False)])
def test_engine_sums_agree_unless_the_router_saw_much_more_time(seen_s: float, agree: bool) -> None:
    reading = sums_of(0.1, seen_s).reading()
    assert reading is not None
    assert reading.ratio == pytest.approx(seen_s / 0.1)
    assert reading.agree is agree
    assert reading.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert reading.seen_bytes_per_s == pytest.approx(1e8 / seen_s)


def test_few_transfers_or_engines_without_reports_give_no_reading() -> None:
    assert sums_of(0.1, 0.1, n=MIN - 1).reading() is None
    sums = sums_of(0.1, 0.1)
    for _ in range(100):
        sums.observed(ELSEWHERE, kv_bytes=1e8, seconds=9.0, now_s=0.0)
    reading = sums.reading()
    assert reading is not None
    assert reading.agree
    sums.freed(HERE)
    for _ in range(100):
        sums.observed(HERE, kv_bytes=1e8, seconds=9.0, now_s=0.0)
    assert sums.reading() == reading


def test_older_transfers_have_less_weight() -> None:
    sums = sums_of(0.1, AGREE)
    at_s = 8 * HALF_S
    for _ in range(MIN):
        sums.observed(HERE, kv_bytes=1e8, seconds=0.1, now_s=at_s)
    sums.reported(HERE, transfers=MIN, kv_bytes=MIN * 10**8, seconds=MIN * 0.1, now_s=at_s)
    reading = sums.reading()
    assert reading is not None
    assert reading.ratio == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("kv_bytes", "seconds"), [(0, 1.0), (10**9, 0.0)])
def test_sums_without_bytes_or_time_give_no_reading(kv_bytes: int, seconds: float) -> None:
    sums = EngineSums()
    sums.reported(HERE, transfers=MIN, kv_bytes=kv_bytes, seconds=seconds, now_s=0.0)
    for _ in range(MIN):
        sums.observed(HERE, kv_bytes=1e8, seconds=0.1, now_s=0.0)
    assert sums.reading() is None


def test_a_links_added_latency_is_not_compared_with_engine_sums() -> None:
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker, zone in ((1, "a"), (2, "b")):
        config = ModelRuntimeConfig(
            topology_domains={"zone": zone}, topology_levels=("zone",), kv_bytes_per_token=100_000
        )
        fleet.join(structs.replace(card(worker), runtime_config=config))
    table = LinkTable(otherwise=Link(0.0, 1e9))
    transfers = Transfers(fleet, RecordedPlacementEvents(), table, RouterId("here"))
    sums = transfers.engine_sums
    sums.reported(ELSEWHERE, transfers=MIN, kv_bytes=MIN * 10**8, seconds=MIN * 0.1, now_s=1.0)
    transfers.state.set_pace(LinkKind("zone", False), LinkPace(1.0, 0.9))
    for _ in range(MIN):
        transfer = transfers.begin(table, HERE, ELSEWHERE, 1000)
        transfers.kv_ready(transfer, is_clear=True, steps_s=0.0, now_s=1.0)
        transfers.arrived(transfer, is_clear=True, steps_s=0.0, now_s=2.0)
    reading = sums.reading()
    assert reading is not None
    assert reading.ratio == pytest.approx(1.0)
