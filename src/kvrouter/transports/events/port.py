"""The port of KV events and load reports, from workers to routers."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, LoadReport, WorkerCard

BatchSink = Callable[[KvBatch], None]
LoadSink = Callable[[LoadReport], None]
MalformedSink = Callable[[str], None]
"""Called for each frame that could not be read, with the reason; the frame is dropped."""

BLOCKS_MAX = 2**32
"""More blocks than any rank has."""

DropSink = Callable[[int, str], None]
"""Called for batches that were not published: how many since the last time, and why the last was not."""


class EventPublisher(Protocol):
    """A worker's end. Publishing never waits: an engine never waits for a router.

    Where a wire cannot take more, batches are dropped and counted: routers see the gap and ask.
    """

    @property
    def source(self) -> EventSource:
        """What the worker's card says about where to listen."""

    def publish(self, batch: KvBatch) -> None:
        """Send a batch of KV events; one without events only reports how far the ids have come."""

    def publish_load(self, report: LoadReport) -> None:
        """Send the latest load of one rank; only the newest matters."""


class RecoveryClient(Protocol):
    """Asks a worker for what was missed. Answers in bounded time; raises only errors of the core tree."""

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when its worker no longer has it."""

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's whole state as its worker knows it, or None when there is no one to ask.

        Raises AnswerTooLarge, before it is read, for one of more bytes than ``blocks_max`` blocks need.
        """


class EventSubscriber(RecoveryClient, Protocol):
    """A router's end. Sinks are called in the order of arrival and must not block.

    What comes by a worker's channel is delivered only if it names a rank of that worker.
    """

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Listen to this worker from now on; return the function that ends it, idempotent.

        What a worker publishes may be delivered without being followed; a followed worker's is. Raises
        ConfigError when the card does not say where to listen.
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


class DropReason(StrEnum):
    """Why a router dropped a message of the event plane before any feed had it."""

    MALFORMED = "malformed"
    OTHER_WORKER = "other_worker"
    OTHER_COMPONENT = "other_component"
    OTHER_LANE = "other_lane"


class ForeignRank(ProtocolError):
    """A message speaks for a rank that is not its channel's, or answers for one that was not asked about."""

    code = "foreign_rank"

    def __init__(self, message: str, *, reason: DropReason = DropReason.OTHER_WORKER) -> None:
        super().__init__(message, param="rank")
        self.reason = reason


ForeignSink = Callable[[ForeignRank], None]
"""Called for each message that spoke for a rank of another worker than its channel's; it is dropped."""


def foreign(rank: WorkerRank, channel: object, reason: DropReason = DropReason.OTHER_WORKER) -> ForeignRank:
    """Return the error for a message that names ``rank`` and came by ``channel``."""
    return ForeignRank(f"rank {rank} was spoken for by {channel}", reason=reason)


class AnswerTooLarge(ProtocolError):
    """A worker announced an answer of more bytes than what was asked for needs."""

    code = "answer_too_large"


class SnapshotFailed(KvrouterError):
    """A snapshot of the index could not be stored; the one before it stays valid."""

    code = "snapshot_failed"


class PendingSnapshot(Protocol):
    """One snapshot of the index on its way into a store; it is nothing before :meth:`commit`.

    It covers what this replica had been handed when it began: a replica that loads it goes on from there.
    """

    def covers(self, rank: WorkerRank) -> bool:
        """Whether all that the rank published before the beginning was handed over here."""

    async def add(self, snapshot: KvSnapshot) -> None:
        """Store one rank, as it is now; raise :class:`SnapshotFailed`."""

    async def commit(self) -> None:
        """Make it the valid one, and purge what it covers; raise :class:`SnapshotFailed`.

        Once it is valid it stays so, also where letting go fails.
        """

    async def abandon(self) -> None:
        """Give it up; what was stored of it goes, soon or when the next one is taken."""


class SnapshotStore(Protocol):
    """Where replicas keep the index for those that start later; one of them at a time takes a snapshot."""

    async def overdue(self, *, messages_max: int) -> Sequence[str]:
        """The components that keep more than ``messages_max`` messages of KV events."""

    async def take(self, component: str) -> PendingSnapshot | None:
        """Begin; None while another replica does, or where nothing new would be covered."""
