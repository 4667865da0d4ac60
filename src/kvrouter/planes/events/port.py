"""The event plane: KV event batches and load reports, from workers to routers."""

from collections.abc import Callable
from typing import Protocol

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, LoadReport, WorkerCard

BatchSink = Callable[[KvBatch], None]
LoadSink = Callable[[LoadReport], None]
MalformedSink = Callable[[str], None]
"""Told of each frame that could not be read, and why; the frame is let go."""


class EventPublisher(Protocol):
    """A worker's end. Publishing never waits: an engine never waits for a router.

    Where a wire cannot take more, batches are dropped and counted: routers see the gap and ask.
    """

    @property
    def source(self) -> EventSource:
        """What the worker's card says about where to listen."""

    def publish(self, batch: KvBatch) -> None:
        """Send a batch of KV events; one without events only tells how far the ids have come."""

    def publish_load(self, report: LoadReport) -> None:
        """Send the latest load of one rank; only the newest matters."""


class RecoveryClient(Protocol):
    """Asks a worker for what was missed. Answers in bounded time; raises only errors of the core tree."""

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when its worker no longer has it."""

    async def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state as its worker knows it, or None when there is no one to ask."""


class EventSubscriber(RecoveryClient, Protocol):
    """A router's end. Sinks are called in the order of arrival and must not block."""

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Listen to this worker from now on; return the function that ends it, idempotent.

        What a worker publishes may be delivered without being followed; a followed worker's is.
        """


class RecoverySource(Protocol):
    """A worker that answers for its own past."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when it is gone."""

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state, or None when the rank is not here."""


class RecoveryServer(Protocol):
    """A worker's end for those who missed something."""

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return the function that ends it."""
