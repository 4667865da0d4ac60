"""Routers side by side, over memory and over a real nats-server: what one learns of links, all know."""

from msgspec import structs

from kvrouter.core.ids import Slot
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.kernel.topology.link_table import ACROSS_LINK, LinkLoad, LinkTable, SharedLink
from kvrouter.settings.router_settings import KvRouterConfig
from tests.oracles.sync import MemorySyncTransport
from tests.testing.router_harness import card
from tests.testing.router_replicas import ReplicaRouter
from tests.testing.sync_transports import MakeTransport, make_transport
from tests.testing.waits import until

__all__ = ["make_transport"]  # the fixture

TIME = KvRouterConfig(router_cost="time")
A_TO_B = SharedLink((("zone", "a"),), "b")
BYTES_PER_TOKEN = 312_500
"""A thousand tokens take 0.1 s over the link that is assumed between zones."""

STATED = LinkTable(by_level={"zone": ACROSS_LINK})
"""Transfers delay each other over links that are stated."""


def replica(name: str, transport: object, *, silent_after_s: float = 20.0) -> ReplicaRouter:
    """With a worker in zone a at slot 0, and one in zone b at slot 1."""
    made = ReplicaRouter(name, transport, workers=(), config=TIME, silent_after_s=silent_after_s)  # type: ignore[arg-type]
    for worker, zone in enumerate("ab"):
        config = ModelRuntimeConfig(
            topology_domains={"zone": zone}, topology_levels=("zone",), kv_bytes_per_token=BYTES_PER_TOKEN
        )
        made.model.fleet.join(structs.replace(card(worker), runtime_config=config))
    return made


def hand_on(router: ReplicaRouter, seconds: float, *, n: int) -> None:
    """Let so many transfers of a thousand tokens each take so long from zone a to zone b."""
    transfers = router.model.placer.transfers
    assert transfers.table is not None
    for _ in range(n):
        transfer = transfers.begin(transfers.table, Slot(0), Slot(1), 1000)
        now_s = router.model.clock()
        transfers.kv_ready(transfer, is_clear=True, steps_s=0.0, now_s=now_s - seconds)
        transfers.arrived(transfer, is_clear=True, steps_s=0.0, now_s=now_s)


def slowness(router: ReplicaRouter) -> float:
    transfers = router.model.placer.transfers
    transfers.learned.refresh((), now_s=router.model.clock())
    return transfers.state.pace_of_kind(A_TO_B.kind).slowness


def load(router: ReplicaRouter) -> LinkLoad:
    return router.model.placer.transfers.state.on(A_TO_B)


def look(router: ReplicaRouter) -> None:
    """What a decision looks at."""
    transfers = router.model.placer.transfers
    transfers.refresh(lambda _slot: True, now_s=router.model.clock())


async def test_learned_link_speeds_reach_all_replicas_and_late_ones(
    make_transport: MakeTransport,
) -> None:
    a, b = replica("a", await make_transport()), replica("b", await make_transport())
    await a.sync.start()
    await b.sync.start()
    hand_on(a, 1.0, n=8)
    await until(lambda: slowness(b) > 9.0)
    c = replica("c", await make_transport())
    assert slowness(c) == 1.0
    await c.sync.start()
    await until(lambda: slowness(c) > 9.0)
    samples = c.model.placer.transfers.learned.samples()
    assert len({seen.number for seen in samples}) == len(samples)  # both passed them on
    for each in (a, b, c):
        await each.sync.stop()


async def test_replicas_count_each_others_transfers_until_they_end(make_transport: MakeTransport) -> None:
    a, b = replica("a", await make_transport()), replica("b", await make_transport())
    for each in (a, b):
        each.model.links_changed(STATED)
        await each.sync.start()
    transfers = a.model.placer.transfers
    assert transfers.table is not None
    begun = [transfers.begin(transfers.table, Slot(0), Slot(1), 1000) for _ in range(3)]
    look(a)
    await until(lambda: load(b) == LinkLoad(3 * 1000.0 * BYTES_PER_TOKEN, 3.0))
    assert load(a) == load(b)
    for transfer in begun:
        transfers.end(transfer)
    await until(lambda: load(b) == LinkLoad(0.0, 0))
    transfers.begin(transfers.table, Slot(0), Slot(1), 1000)
    transfers._refreshed_s = 0.0
    look(a)
    await until(lambda: load(b).transfers > 0.0)
    await a.sync.stop()
    await until(lambda: load(b) == LinkLoad(0.0, 0))
    await b.sync.stop()


async def test_a_router_with_another_link_table_ignores_learned_speeds() -> None:
    transport = MemorySyncTransport()
    a, b = replica("a", transport), replica("b", transport)
    b.model.links_changed(STATED)
    heard: list[object] = []
    transport._sinks["ear"] = heard.append  # type: ignore[index]
    await a.sync.start()
    await b.sync.start()
    hand_on(a, 1.0, n=8)
    await until(lambda: any(type(message).__name__ == "LinkUpdate" for message in heard))
    await until(lambda: b.sync.counts().others.replicas == 1)
    assert slowness(b) == 1.0
    assert b.model.placer.transfers.learned.samples() == []
    await a.sync.stop()
    await b.sync.stop()
