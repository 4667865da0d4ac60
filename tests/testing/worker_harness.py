"""One worker on memory planes, next to an engine that does what the test says."""

import asyncio

from msgspec.structs import replace

from kvrouter.core.events import KvBatch, KvEvent, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, ModelName, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.engines.port import EventsSink, LoadSink, StateSink
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.worker import Worker, parse_topology_env
from tests.testing.engine_requests import plain_leg
from tests.testing.plain_fleets import worker_card

WORKER, EPOCH = WorkerId(6), Epoch(123)
RANK = WorkerRank(WORKER, DpRank(0))
COLUMN = pack_hashes([1])
STORED = Stored(None, COLUMN, COLUMN)


class ScriptedStream:
    """Gives what the test puts; None ends it."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[EngineChunk | Exception] = asyncio.Queue(8)
        self.cancelled: str | None = None

    def __aiter__(self) -> "ScriptedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        chunk = await self.chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


class ScriptedEngine:
    def __init__(self) -> None:
        self.streams: list[ScriptedStream] = []
        self.stops = 0
        self.on_events: EventsSink | None = None
        self.on_load: LoadSink | None = None
        self.on_state: StateSink | None = None

    def watch(self, on_state: StateSink) -> None:
        self.on_state = on_state

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        self.on_events, self.on_load = on_events, on_load

    async def submit(self, request: EngineRequest) -> ScriptedStream:
        self.streams.append(ScriptedStream())
        return self.streams[-1]

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        return (STORED,)

    def held_blocks(self, dp_rank: DpRank) -> int | None:
        return STORED.n_blocks

    async def stop(self) -> None:
        self.stops += 1

    def tell(self, *events: KvEvent) -> None:
        assert self.on_events is not None
        self.on_events(DpRank(0), events)

    def report(self, load: LoadReport) -> None:
        assert self.on_load is not None
        self.on_load(load)


class SlowDiscovery(MemoryDiscovery):
    """Says that other routers than the test's read a card so many seconds later."""

    def __init__(self, propagation_s: float) -> None:
        super().__init__()
        self.propagation_s = propagation_s


class WorkerHarness:
    """One worker and its planes, and what a router would see."""

    def __init__(
        self,
        *,
        heartbeat_s: float = 60.0,
        environ: dict[str, str] | None = None,
        propagation_s: float = 0.0,
    ) -> None:
        self.engine = ScriptedEngine()
        self.discovery, self.events, self.requests = (
            SlowDiscovery(propagation_s),
            MemoryEventTransport(),
            MemoryRequestTransport(),
        )
        self.cards: asyncio.Queue[WorkerCard | None] = asyncio.Queue(8)
        self.batches: asyncio.Queue[KvBatch] = asyncio.Queue(8)
        self.loads: list[LoadReport] = []
        self.events.subscribe(self.batches.put_nowait, self.loads.append)
        card = worker_card(
            WORKER,
            incarnation=EPOCH,
            block_size=1,
            context_length=64,
            address=memory_address(WORKER, EPOCH),
        )
        self.worker = Worker(
            self.engine,
            card,
            discovery=self.discovery,
            events=self.events,
            requests=self.requests,
            recovery=self.events,
            topology=None if environ is None else parse_topology_env(environ),
            heartbeat_s=heartbeat_s,
        )

    async def start(self) -> None:
        await self.discovery.watch(self.cards.put_nowait, lambda *_: self.cards.put_nowait(None))
        await self.worker.start()

    def request(self, *, model: str = "m", dp_rank: int = 0, request_id: str = "r") -> EngineRequest:
        leg = plain_leg(request_id, [1, 2], max_tokens=2, dp_rank=DpRank(dp_rank))
        return replace(leg, model=ModelName(model))
