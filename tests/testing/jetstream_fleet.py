"""Workers with mock engines, and routers with real indexes, on the JetStream transport of a real nats-server.

The truth is what the engines find in their own caches.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from nats.aio.client import Client

from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerRank
from kvrouter.core.requests import EngineRequest
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.index_snapshots import IndexSnapshots
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.jetstream import JetStreamPublisher, JetStreamSubscriber
from kvrouter.transports.events.jetstream.publisher import PublisherLimits
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.worker import KvPublisher
from tests.testing.blocks import Blocks, blocks, blocks_of_cache
from tests.testing.engine_requests import plain_leg
from tests.testing.event_transports import TOKEN, TransportReports, connect
from tests.testing.plain_fleets import worker_card
from tests.testing.waits import until

BLOCK_SIZE = 4
DP_SIZE = 2


class Worker:
    """One start of a worker: an engine whose cache begins empty, and its publisher."""

    def __init__(self, fleet: "Fleet", worker_id: int, *, component: str, epoch: int) -> None:
        self.card = worker_card(
            worker_id,
            incarnation=Epoch(epoch),
            block_size=BLOCK_SIZE,
            dp_size=DP_SIZE,
            component=component,
            event_source=fleet.publisher(component).source,
        )
        self._fleet = fleet
        self._chance = random.Random(worker_id + epoch)
        self._now_s = 0.0
        self._served = 0
        self.engine = MockEngine(
            MockConfig(block_size=BLOCK_SIZE, total_kv_blocks=48, dp_size=DP_SIZE, seed=epoch),
            worker_id=self.card.worker_id,
            engine_id=f"mock-{worker_id}-{epoch}",
        )
        self.publisher = WorkerPublisher(self, fleet.publisher(component))
        self.end_recovery = fleet.recovery.serve_recovery(self.card.worker_id, self.publisher.kv)

    def serve(self, n_requests: int = 4) -> None:
        """Let each rank run requests; every store and every eviction is published."""
        for _ in range(n_requests):
            for rank in self.card.ranks():
                prompt = [self._chance.randrange(3)] * self._chance.randrange(4, 40)
                self.engine.submit(self._now_s, self._request(rank, prompt))
            self._now_s += 100.0
            self.engine.advance(self._now_s)
            self.publisher.tell()

    def heartbeat(self) -> None:
        self.publisher.kv.heartbeat([rank.dp_rank for rank in self.card.ranks()])

    def holds(self, rank: WorkerRank) -> Blocks:
        """What the engine's own cache holds, by a walk of its blocks."""
        return blocks_of_cache(self.engine.snapshot(rank.dp_rank))

    def die(self) -> None:
        self.publisher.kv.close()
        self.end_recovery()

    def _request(self, rank: WorkerRank, prompt: list[int]) -> EngineRequest:
        self._served += 1
        name = f"{self.card.worker_id}-{self._served}"
        return plain_leg(name, [*prompt, self._served], max_tokens=3, dp_rank=rank.dp_rank)


class WorkerPublisher:
    """A worker's publisher, given the engine's events."""

    def __init__(self, worker: Worker, events: JetStreamPublisher) -> None:
        self._engine = worker.engine
        self.kv = KvPublisher(
            events,
            worker_id=worker.card.worker_id,
            epoch=worker.card.incarnation,
            block_size=BLOCK_SIZE,
            snapshot=self._snapshot,
        )

    def tell(self) -> None:
        for dp_rank, events in self._engine.take_outputs().events:
            self.kv.publish(dp_rank, tuple(events))
        self.kv.flush()

    def _snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        self.tell()
        return self._engine.snapshot(dp_rank)


class CountingRecovery:
    """Asks workers, unless they are said to refuse; counts the questions."""

    def __init__(self, recovery: NatsRecovery) -> None:
        self.refuses = False
        self.asked = 0
        self._recovery = recovery

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        self.asked += 1
        return None if self.refuses else await self._recovery.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        self.asked += 1
        return None if self.refuses else await self._recovery.recover_snapshot(rank, blocks_max=blocks_max)


class Replica:
    """One start of a router: an index that begins empty."""

    def __init__(
        self, fleet: "Fleet", client: Client, name: str, *, refused: bool, resets: bool = False
    ) -> None:
        self.notes = TransportReports()
        self.client = client
        self.recovery = NatsRecovery(
            client, namespace=fleet.namespace, token=fleet.token, on_malformed=self.notes.refused
        )
        self.asking = CountingRecovery(self.recovery)
        self.asking.refuses = refused
        self.subscriber = JetStreamSubscriber(
            client,
            self.asking,
            namespace=fleet.namespace,
            token=fleet.token,
            replica_name=name,
            observer=self.notes,
            resets_states=resets,
            heartbeat_s=0.2,
            lease_s=0.5,
        )
        self.index = NativeBlockIndex()
        self.telemetry = Telemetry()
        self.ingest = EventIngest(self.index, self.subscriber, ModelInstrumentation(self.telemetry, "m"))
        self.subscriber.subscribe(self.ingest.on_batch, lambda _report: None)
        cache = EventCacheView(self.index, self.ingest, NativeApproximateIndex())
        self.snapshots = IndexSnapshots(self.subscriber, lambda: [cache], messages_max=0)
        self.slots: dict[WorkerRank, Slot] = {}
        self._fleet = fleet

    def join(self, *workers: Worker) -> None:
        """Discovery tells of workers."""
        for worker in workers:
            self.subscriber.follow(worker.card)
            for rank in worker.card.ranks():
                if rank in self.slots:
                    self.ingest.freed(self.slots[rank])
                slot = self.slots.setdefault(rank, Slot(len(self.slots)))
                self.ingest.joined(rank, slot, worker.card.incarnation)

    def believes(self, rank: WorkerRank) -> Blocks:
        return blocks(self.index.dump(self.slots[rank]))

    def state(self, rank: WorkerRank) -> FeedState:
        feed = self.ingest.feed_at(self.slots[rank])
        assert feed is not None
        return feed.state

    def is_right(self, *workers: Worker) -> bool:
        """Whether the index is what the engines' caches are."""
        return all(
            self.state(rank) is FeedState.LIVE and self.believes(rank) == worker.holds(rank)
            for worker in workers
            for rank in worker.card.ranks()
        )

    async def until_right(self, *workers: Worker) -> None:
        await until(lambda: self.is_right(*workers))

    async def stop(self) -> None:
        """End; what was learned is forgotten."""
        self.ingest.close()
        await self.subscriber.close()
        await self.recovery.close()
        await self.client.close()


class Fleet:
    """Workers and routers of one namespace, with one token."""

    def __init__(self, url: str, worker_client: Client, *, namespace: str, token: str) -> None:
        self.url = url
        self.namespace = namespace
        self.token = token
        self.notes = TransportReports()
        self.client = worker_client
        self.recovery = NatsRecovery(
            worker_client, namespace=self.namespace, token=token, on_malformed=self.notes.refused
        )
        self._publishers: dict[str, JetStreamPublisher] = {}
        self._replicas: list[Replica] = []

    def publisher(self, component: str) -> JetStreamPublisher:
        if component not in self._publishers:
            self._publishers[component] = JetStreamPublisher(
                self.client,
                namespace=self.namespace,
                component=component,
                token=self.token,
                observer=self.notes,
                limits=PublisherLimits(ack_timeout_s=20.0),
            )
        return self._publishers[component]

    def worker(self, worker_id: int, *, component: str = "backend", epoch: int = 1) -> Worker:
        return Worker(self, worker_id, component=component, epoch=epoch)

    async def replica(self, name: str, *, refused: bool = False, resets: bool = False) -> Replica:
        """A router starts; with ``refused`` no worker answers it."""
        replica = Replica(self, await connect(self.url), name, refused=refused, resets=resets)
        self._replicas.append(replica)
        return replica

    async def knows(self, name: str, *workers: Worker, refused: bool = False) -> Replica:
        """A router starts, and its index is right."""
        replica = await self.replica(name, refused=refused)
        replica.join(*workers)
        await replica.until_right(*workers)
        return replica

    async def knows_from_nats(self, name: str, *workers: Worker) -> Replica:
        """A router starts, and its index is right without a question to a worker."""
        replica = await self.knows(name, *workers, refused=True)
        assert replica.asking.asked == 0
        return replica

    async def known(
        self, *names: str, serves: int, refused: bool = False
    ) -> tuple[Worker, tuple[Replica, ...]]:
        """A worker that has served, and routers that followed it."""
        worker = self.worker(1)
        replicas = tuple([await self.replica(name, refused=refused) for name in names])
        for replica in replicas:
            replica.join(worker)
        worker.serve(serves)
        for replica in replicas:
            await replica.until_right(worker)
        return worker, replicas

    async def published(self) -> None:
        """Wait until everything is in the stream."""
        await until(lambda: all(publisher.is_idle for publisher in self._publishers.values()))

    async def close(self) -> None:
        for publisher in self._publishers.values():
            await publisher.close()
        await self.recovery.close()
        for replica in self._replicas:
            if not replica.client.is_closed:
                await replica.stop()
        await self.client.close()


@asynccontextmanager
async def fleet_on(url: str, *, namespace: str = "", token: str = TOKEN) -> AsyncIterator[Fleet]:
    """A fleet in a namespace of its own, if none is given."""
    fleet = Fleet(url, await connect(url), namespace=namespace or f"test-{uuid4().hex}", token=token)
    try:
        yield fleet
    finally:
        await fleet.close()
