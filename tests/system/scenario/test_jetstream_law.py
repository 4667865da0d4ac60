"""Whatever happens, in any order: in the end every router's index is what the engines' caches are."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from nats.js.errors import NotFoundError

from kvrouter.transports.events.jetstream.stream import ComponentNames
from tests.testing.jetstream_fleet import Fleet, Replica, Worker, fleet_on
from tests.testing.nats_server import NatsServer

STEPS = 60
LIMIT_S = 120.0


@pytest.fixture
async def fleet(own_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(own_nats.url) as opened:
        yield opened


class Walk:
    """Two workers, two routers, one broker, and what may become of them."""

    def __init__(self, fleet: Fleet, broker: NatsServer, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fleet = fleet
        self.broker = broker
        self.workers: dict[int, Worker] = {}
        self.replicas: dict[str, Replica] = {}
        self.epoch = 0
        self.happened: list[str] = []

    async def start(self) -> None:
        for worker_id in (1, 2):
            self.start_worker(worker_id)
        for name in ("a", "b"):
            await self.start_replica(name)

    def start_worker(self, worker_id: int) -> None:
        self.epoch += 1
        self.workers[worker_id] = self.fleet.worker(worker_id, epoch=self.epoch)

    async def start_replica(self, name: str) -> None:
        self.replicas[name] = await self.fleet.replica(name)
        self.replicas[name].join(*self.workers.values())

    async def step(self) -> None:
        acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self.serve),
            (3, self.wait),
            (4, self.snapshot),
            (2, self.heartbeat),
            (2, self.router_restarts),
            (1, self.worker_restarts),
            (1, self.consumer_goes),
            (1, self.stream_is_purged),
            (1, self.broker_restarts),
        ]
        (act,) = self.chance.choices([act for _, act in acts], [weight for weight, _ in acts])
        self.happened.append(act.__name__)
        await act()

    async def serve(self) -> None:
        self.chance.choice(list(self.workers.values())).serve(self.chance.randrange(1, 6))

    async def wait(self) -> None:
        await asyncio.sleep(self.chance.choice([0.0, 0.01, 0.1]))

    async def heartbeat(self) -> None:
        for worker in self.workers.values():
            worker.heartbeat()

    async def snapshot(self) -> None:
        await self.chance.choice(list(self.replicas.values())).snapshots.check()

    async def router_restarts(self) -> None:
        name = self.chance.choice(list(self.replicas))
        await self.replicas[name].stop()
        await self.start_replica(name)

    async def worker_restarts(self) -> None:
        worker_id = self.chance.choice(list(self.workers))
        self.workers[worker_id].die()
        self.start_worker(worker_id)
        if self.chance.random() < 0.5:
            await self.serve()
        for replica in self.replicas.values():
            replica.join(self.workers[worker_id])

    async def consumer_goes(self) -> None:
        name = self.chance.choice(list(self.replicas))
        with suppress(NotFoundError):
            await self.fleet.client.jetstream().delete_consumer(self.stream, f"kvrouter-{name}")

    async def stream_is_purged(self) -> None:
        await self.fleet.client.jetstream().purge_stream(self.stream)

    async def broker_restarts(self) -> None:
        await asyncio.to_thread(self.broker.restart)
        async with asyncio.timeout(LIMIT_S):
            while not self.fleet.client.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def stream(self) -> str:
        return ComponentNames(self.fleet.namespace, "backend").stream

    async def until_right(self) -> None:
        """Heartbeats flow, and nothing else happens."""
        loop = asyncio.get_running_loop()
        last_s = loop.time() + LIMIT_S
        workers = list(self.workers.values())
        while not all(replica.is_right(*workers) for replica in self.replicas.values()):
            assert loop.time() < last_s, self.happened
            await self.heartbeat()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_indexes_converge_to_the_caches_after_random_faults(
    fleet: Fleet, own_nats: NatsServer, seed: int
) -> None:
    walk = Walk(fleet, own_nats, seed)
    await walk.start()
    await walk.serve()
    await fleet.published()
    for _ in range(STEPS):
        await walk.step()
    await walk.until_right()
    late = await fleet.replica("late")
    late.join(*walk.workers.values())
    walk.replicas["late"] = late
    await walk.until_right()
