"""A KvRouter with replica sync that does not get to start, or is closed early: no other router counts it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import RouterId
from kvrouter.core.workers import WorkerCard
from kvrouter.library import KvRouter, Runtime
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.events.port import BatchSink, LoadSink
from kvrouter.transports.records.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.sync.port import MessageSink
from tests.oracles.sync import MemorySyncTransport
from tests.testing.router_harness import ScriptedDiscovery, ScriptedEvents, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until


class Away(ScriptedDiscovery):
    """Discovery that keeps whoever asks waiting until it is ``back``; then it raises ``error``, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.back = asyncio.Event()
        self.error: Exception | None = None
        self.asked = 0

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        self.asked += 1
        await self.back.wait()
        if self.error is not None:
            raise self.error
        return await super().watch(on_card, on_gone, on_store)


class CountedEvents(ScriptedEvents):
    def __init__(self) -> None:
        super().__init__()
        self.ears = 0

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        end = super().subscribe(on_batch, on_load)
        self.ears += 1

        def counted() -> None:
            self.ears -= 1
            end()

        return counted


class SlowToEnd(MemorySyncTransport):
    """A wire whose last words take their time. ``here`` counts the routers on it."""

    def __init__(self) -> None:
        super().__init__()
        self.here = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        end = await super().subscribe(router_id, on_message)
        self.here += 1

        async def slow() -> None:
            await self.may_end.wait()
            await end()
            self.here -= 1

        return slow


class World:
    """A router before two workers, on wires that can be looked at."""

    def __init__(self, *cards: WorkerCard) -> None:
        self.discovery, self.events, self.wire = Away(), CountedEvents(), SlowToEnd()
        self.discovery.put(*(cards or (card(1), card(2))))
        runtime = Runtime(
            self.discovery,
            ScriptedTransport(),
            self.events,
            replica_sync=lambda: ReplicaSync(self.wire),
        )
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        self.router = KvRouter(endpoint, 16, KvRouterConfig(replica_sync=True))

    @property
    def left(self) -> tuple[int, int, list[str]]:
        """Routers that others count, ears for events, and tasks of replica sync that run."""
        tasks = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("sync:")]
        return self.wire.here, self.events.ears, tasks


async def test_a_failed_start_leaves_nothing_and_can_be_retried() -> None:
    world = World()
    world.discovery.back.set()
    world.discovery.error = OSError("the store is away")
    for _ in range(2):
        with pytest.raises(OSError, match="the store is away"):
            await world.router.start()
        await until(lambda: world.left == (0, 0, []))
    world.discovery.error = None
    async with world.router as router:
        assert world.left == (1, 1, ["sync: beat"])
        assert (await router.best_worker(list(range(40)))).worker_id in {1, 2}
    await until(lambda: world.left == (0, 0, []))


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    world = World()
    starting = asyncio.create_task(world.router.start())
    await until(lambda: world.discovery.asked == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: world.left == (0, 0, []))
    world.router.close()
    world.router.close()
    with pytest.raises(ShuttingDown):
        await world.router.start()


async def test_a_router_closed_while_starting_does_not_start() -> None:
    world = World()
    starting = asyncio.create_task(world.router.start())
    await until(lambda: world.discovery.asked == 1)
    world.router.close()
    world.discovery.back.set()
    with pytest.raises(ShuttingDown):
        await starting
    await until(lambda: world.left == (0, 0, []))


async def test_leaving_the_context_waits_for_an_earlier_close() -> None:
    world = World()
    world.discovery.back.set()
    world.wire.may_end.clear()

    async def use() -> None:
        async with world.router as router:
            router.close()
            await asyncio.sleep(0)

    using = asyncio.create_task(use())
    done, _ = await asyncio.wait((using,), timeout=0.05)
    assert not done, "its goodbye is not said"
    world.wire.may_end.set()
    await using
    assert world.left == (0, 0, [])
