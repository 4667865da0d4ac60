"""Both ends of the memory event plane."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrouter.core.ids import WorkerId
from kvrouter.planes.events.memory import MemoryEventPlane
from kvrouter.planes.events.port import EventPublisher, EventSubscriber, RecoverySource


class MemoryEnds:
    def __init__(self) -> None:
        self.plane = MemoryEventPlane()
        self.publisher: EventPublisher = self.plane
        self.subscriber: EventSubscriber = self.plane

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.plane.serve_recovery(worker_id, source)


@asynccontextmanager
async def memory_ends(_nats_url: str, _namespace: str) -> AsyncIterator[MemoryEnds]:
    yield MemoryEnds()
