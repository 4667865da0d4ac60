"""Both ends of the memory event plane."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource


class MemoryTransport:
    def __init__(self) -> None:
        self.foreign: list[ForeignRank] = []
        self.transport = MemoryEventTransport()
        self.publisher: EventPublisher = self.transport
        self.subscriber: EventSubscriber = self.transport

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.transport.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        raise NotImplementedError("a call has no channel")


@asynccontextmanager
async def memory_transport(_nats_url: str, _namespace: str) -> AsyncIterator[MemoryTransport]:
    yield MemoryTransport()
