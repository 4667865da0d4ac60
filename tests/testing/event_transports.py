"""Both ends of every event plane, by name, for the tests that hold over all of them."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource
from tests.testing.event_transport_jetstream import jetstream_transport
from tests.testing.event_transport_memory import memory_transport
from tests.testing.event_transport_nats import nats_transport
from tests.testing.event_transport_zmq import zmq_transport


class EventTransportSetup(Protocol):
    """One worker process and one router on one plane, which deliver to each other already."""

    @property
    def publisher(self) -> EventPublisher: ...
    @property
    def subscriber(self) -> EventSubscriber: ...

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]: ...

    @property
    def foreign(self) -> list[ForeignRank]:
        """What the router was notified of messages that spoke for somebody else's rank."""

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        """An admitted worker says both on the channel that is ``channel``'s, whatever rank they name."""


@dataclass(frozen=True)
class EventTransportKind:
    """``open`` takes the URL of a nats-server, or "" where none is needed, and a namespace of its own.

    Its router follows the workers 4 and 5. Without channels, within one process, a batch comes by nothing
    but a call.
    """

    open: Callable[[str, str], AbstractAsyncContextManager[EventTransportSetup]]
    needs_nats: bool = False
    has_channels: bool = True


EVENT_TRANSPORTS: dict[str, EventTransportKind] = {
    "memory": EventTransportKind(memory_transport, has_channels=False),
    "zmq": EventTransportKind(zmq_transport),
    "nats": EventTransportKind(nats_transport, needs_nats=True),
    "jetstream": EventTransportKind(jetstream_transport, needs_nats=True),
}
