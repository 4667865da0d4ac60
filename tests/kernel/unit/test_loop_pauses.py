"""Pauses of the event loop, and what they do to what is learned of links."""

import time

from msgspec import structs

from kvrouter.core.ids import RouterId, Slot
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.transfers import Transfers
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.transports.background import PAUSE_S, LoopPauses
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card
from tests.testing.waits import until

TABLE = LinkTable(otherwise=Link(1e-3, 1e9))


async def test_a_blocked_event_loop_is_reported_with_its_duration() -> None:
    heard: list[float] = []
    pauses = LoopPauses(heard.append, tick_s=0.001)
    pauses.start()
    time.sleep(0.1)  # noqa: ASYNC251 - what is to be noticed
    await until(lambda: max(heard, default=0.0) >= 0.1 - PAUSE_S)
    pauses.stop()
    pauses.stop()
    assert pauses._timer is None


def moving() -> tuple[Transfers, RecordedPlacementEvents]:
    fleet, events = Fleet(MODEL, BLOCK_SIZE), RecordedPlacementEvents()
    for worker, zone in ((1, "a"), (2, "b")):
        config = ModelRuntimeConfig(
            topology_domains={"zone": zone}, topology_levels=("zone",), kv_bytes_per_token=100_000
        )
        fleet.join(structs.replace(card(worker), runtime_config=config))
    return Transfers(fleet, events, TABLE, RouterId("here")), events


def test_a_transfer_during_a_long_event_loop_pause_is_not_measured() -> None:
    for paused_s, learns in ((0.0, True), (0.01, True), (0.5, False)):
        transfers, _ = moving()
        transfer = transfers.begin(TABLE, Slot(0), Slot(1), 1000)
        transfers.kv_ready(transfer, is_clear=True, steps_s=0.0, now_s=10.0)
        transfers.paused(paused_s)
        transfers.arrived(transfer, is_clear=True, steps_s=0.0, now_s=11.0)
        assert bool(transfers.learned.readings()) is learns


def test_an_event_loop_pause_does_not_make_transfers_late() -> None:
    for paused_s, turns in ((0.0, 1), (5.0, 0)):
        transfers, events = moving()
        for n in range(8):  # each takes 0.1 s by the table, and did
            transfer = transfers.begin(TABLE, Slot(0), Slot(1), 1000)
            transfers.kv_ready(transfer, is_clear=True, steps_s=0.0, now_s=float(n))
            transfers.arrived(transfer, is_clear=True, steps_s=0.0, now_s=n + 0.101)
        for _ in range(4):
            transfer = transfers.begin(TABLE, Slot(0), Slot(1), 1000)
            transfers.kv_ready(transfer, is_clear=True, steps_s=0.0, now_s=10.0)
        transfers.paused(paused_s)
        transfers.refresh(lambda _slot: True, now_s=15.1)
        assert len(events.links) == turns
