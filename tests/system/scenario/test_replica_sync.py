"""Routers side by side, over memory and over a real nats-server: what one books, all count."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats
import pytest

from kvrouter.core.errors import AllWorkersBusy
from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import SyncMessage
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.sync.nats import NatsSyncTransport
from kvrouter.transports.sync.port import MessageSink
from tests.oracles.sync import MemorySyncTransport
from tests.testing.nats_server import NatsServer
from tests.testing.router_replicas import ReplicaRouter
from tests.testing.sync_transports import MakeTransport, make_transport
from tests.testing.waits import until

__all__ = ["make_transport"]  # the fixture


async def test_replicas_count_each_others_bookings(make_transport: MakeTransport) -> None:
    a, b = [ReplicaRouter(name, await make_transport()) for name in "ab"]
    await a.sync.start()
    await b.sync.start()
    placed = [await a.place() for _ in range(4)]
    assert len(a.loads()) == 4  # one each
    await until(lambda: b.loads() == a.loads())
    own = await b.place()
    await until(lambda: a.loads() == b.loads())
    for placement in placed:
        a.model.first_token(placement)
        a.model.placer.output_blocks(placement, 3, now_s=a.model.clock())
    await until(lambda: a.loads() == b.loads() and (0, 7) in b.loads().values())
    for placement in placed:
        a.model.release(placement)
    b.model.release(own)
    await until(lambda: not a.loads() and not b.loads())
    await a.sync.stop()
    await b.sync.stop()


async def test_a_router_started_late_learns_all_bookings(make_transport: MakeTransport) -> None:
    a = ReplicaRouter("a", await make_transport())
    await a.sync.start()
    placed = [await a.place(n_blocks=n) for n in range(1, 600)]
    b = ReplicaRouter("b", await make_transport(), workers=())
    await b.sync.start()
    await until(lambda: b.sync.counts().others.leases == 599)
    assert not b.loads()
    for worker in (2, 0, 3, 1):
        b.join(worker)
    assert b.loads() == a.loads()
    for placement in placed:
        a.model.release(placement)
    await until(lambda: not b.loads())
    await a.sync.stop()
    await b.sync.stop()


async def test_a_stopped_routers_load_is_removed(make_transport: MakeTransport) -> None:
    a, b = ReplicaRouter("a", await make_transport()), ReplicaRouter("b", await make_transport())
    await a.sync.start()
    await b.sync.start()
    await a.place()
    await until(lambda: bool(b.loads()))
    await a.sync.stop()
    await until(lambda: not b.loads())
    assert b.sync.counts().others.lost == 0
    await a.sync.stop()
    await b.sync.stop()


async def test_a_dead_routers_load_is_removed_after_its_silence() -> None:
    transport = MemorySyncTransport()
    a = ReplicaRouter("a", transport)
    b = ReplicaRouter("b", transport, silent_after_s=0.3)
    await a.sync.start()
    await b.sync.start()
    await a.place()
    await until(lambda: bool(b.loads()))
    transport._sinks.pop(a.sync.router_id)
    assert a.sync._beat is not None
    a.sync._beat.cancel()
    await until(lambda: not b.loads())
    assert b.sync.counts().others.lost == 1
    await b.sync.stop()


async def test_a_queued_request_is_released_by_another_routers_release() -> None:
    transport = MemorySyncTransport()
    config = KvRouterConfig(active_prefill_tokens_threshold=100, admission_queue_max=4, admission_wait_s=30.0)
    a = ReplicaRouter("a", transport, workers=(1,))
    b = ReplicaRouter("b", transport, workers=(1,), config=config)
    await a.sync.start()
    await b.sync.start()
    placement = await a.place(n_blocks=20)
    await until(lambda: bool(b.loads()))
    waiting = asyncio.ensure_future(b.place())
    await until(lambda: len(b.model.placer.waiting) == 1)
    a.model.first_token(placement)
    async with asyncio.timeout(60):
        await waiting
    refusing = ReplicaRouter(
        "c", transport, workers=(1,), config=KvRouterConfig(active_prefill_tokens_threshold=10)
    )
    await refusing.sync.start()
    await until(lambda: any(prefill_tokens for prefill_tokens, _ in refusing.loads().values()))
    with pytest.raises(AllWorkersBusy):
        await refusing.place()
    for router in (a, b, refusing):
        await router.sync.stop()


async def test_routers_agree_again_after_a_broker_outage(own_nats: NatsServer) -> None:
    clients = [
        await nats.connect(own_nats.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
        for _ in range(2)
    ]
    a, b = [
        ReplicaRouter(name, NatsSyncTransport(client, namespace="ns", token="t0p"))
        for name, client in zip("ab", clients, strict=True)
    ]
    await a.sync.start()
    await b.sync.start()
    gone = await a.place()
    await until(lambda: a.loads() == b.loads())
    own_nats.kill()
    await until(lambda: not any(client.is_connected for client in clients))
    a.model.release(gone)
    await a.place(n_blocks=7)
    await a.place(n_blocks=9)
    await until(lambda: a.sync.counts().unsent > 0)
    own_nats.start()
    await until(lambda: a.loads() == b.loads())
    assert b.sync.counts().others.gaps >= 1
    for router, client in zip((a, b), clients, strict=True):
        await router.sync.stop()
        await client.close()


async def test_stopping_does_not_wait_for_a_lost_broker(own_nats: NatsServer) -> None:
    client = await nats.connect(own_nats.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    a = ReplicaRouter("a", NatsSyncTransport(client, namespace="ns", token="t0p"))
    await a.sync.start()
    own_nats.kill()
    await until(lambda: not client.is_connected)
    await a.place()
    async with asyncio.timeout(30):
        await a.sync.stop()
    with suppress(OSError):  # the client passes on how its last connection ended
        await client.close()


class Refusing(MemorySyncTransport):
    """A wire that takes messages and no listeners."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[SyncMessage] = []

    def publish(self, message: SyncMessage, *, to: RouterId | None = None) -> bool:
        self.published.append(message)
        return super().publish(message, to=to)

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        raise OSError("not connected")


async def test_a_router_whose_start_failed_publishes_nothing() -> None:
    transport = Refusing()
    router = ReplicaRouter("a", transport)
    with pytest.raises(OSError, match="not connected"):
        await router.sync.start()
    await router.place()
    await asyncio.sleep(0.1)
    assert transport.published == []
