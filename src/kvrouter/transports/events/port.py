"""The port of event transports: KV events and load reports, from workers to routers."""

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
"""Called for each dropped frame that could not be decoded, with the reason."""

BLOCKS_MAX = 2**32
"""More blocks than any rank has."""

DropSink = Callable[[int, str], None]
"""Called for dropped batches: (how many since the last call, the reason of the last one)."""


class EventPublisher(Protocol):
    """A worker's end of an event transport. Publishing never waits: an engine never waits for a router.

    When the transport is full, batches are dropped and counted: routers notice the gap and ask.
    """

    @property
    def source(self) -> EventSource:
        """The part of the worker's card that tells routers where to subscribe."""

    def publish(self, batch: KvBatch) -> None:
        """Send a batch of KV events; one without events only reports the next event id."""

    def publish_load(self, report: LoadReport) -> None:
        """Send the latest load of one rank; only the newest matters."""


class RecoveryClient(Protocol):
    """Asks a worker for missed events. Answers in bounded time; raises only errors of the core tree."""

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Return the events ``first`` to ``last`` (inclusive), or None when the worker no longer has them."""

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """Return the rank's state from its worker, or None without a worker to ask.

        Raises AnswerTooLarge, before reading it, for an answer larger than ``blocks_max`` blocks need.
        """


class EventSubscriber(RecoveryClient, Protocol):
    """A router's end of an event transport. Sinks are called in the order of arrival and must not block.

    A message on a worker's channel is delivered only if it is about a rank of that worker.
    """

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Follow this worker from now on; return the function that ends it, idempotent.

        A followed worker's messages are delivered; those of other workers may be. Raises ConfigError when the
        card does not say where to subscribe.
        """


class RecoverySource(Protocol):
    """Answers for a worker's past events."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Return the events ``first`` to ``last`` (inclusive), or None when they are gone."""

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """Return the rank's state, or None for an unknown rank."""


class RecoveryServer(Protocol):
    """A worker's end of recovery: answers routers that missed events."""

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return the function that ends it."""


class DropReason(StrEnum):
    """Why a router dropped a message of an event transport before any feed received it."""

    MALFORMED = "malformed"
    OTHER_WORKER = "other_worker"
    OTHER_COMPONENT = "other_component"
    OTHER_TRANSPORT = "other_lane"


class ForeignRank(ProtocolError):
    """A message is about a rank of another channel, or an answer is about another rank than the question."""

    code = "foreign_rank"

    def __init__(self, message: str, *, reason: DropReason = DropReason.OTHER_WORKER) -> None:
        super().__init__(message, param="rank")
        self.reason = reason


ForeignSink = Callable[[ForeignRank], None]
"""Called for each dropped message about a rank of another worker than its channel's."""


def foreign(rank: WorkerRank, channel: object, reason: DropReason = DropReason.OTHER_WORKER) -> ForeignRank:
    """Return the error for a message about ``rank`` that came on ``channel``."""
    return ForeignRank(f"rank {rank} was spoken for by {channel}", reason=reason)


class AnswerTooLarge(ProtocolError):
    """A worker announced an answer with more bytes than its question needs."""

    code = "answer_too_large"


class SnapshotFailed(KvrouterError):
    """A snapshot of the index could not be stored; the one before it stays valid."""

    code = "snapshot_failed"


class PendingSnapshot(Protocol):
    """One snapshot of the index being stored; it is valid only after :meth:`commit`.

    It covers what this replica had received when it began: a replica that loads it continues from there.
    """

    def covers(self, rank: WorkerRank) -> bool:
        """Whether this replica has received all of the rank's messages up to the beginning."""

    async def add(self, snapshot: KvSnapshot) -> None:
        """Store one rank, as it is now; raise :class:`SnapshotFailed`."""

    async def commit(self) -> None:
        """Make it the valid snapshot, and purge what it covers; raise :class:`SnapshotFailed`.

        Once valid it stays so, even when the purge fails.
        """

    async def abandon(self) -> None:
        """Give it up; its stored parts are removed, now or when the next snapshot is taken."""


class SnapshotStore(Protocol):
    """Stores snapshots of the index for replicas that start later; one replica at a time takes one."""

    async def overdue(self, *, messages_max: int) -> Sequence[str]:
        """Return the components with more than ``messages_max`` stored messages of KV events."""

    async def take(self, component: str) -> PendingSnapshot | None:
        """Begin a snapshot; None while another replica takes one, or where it would cover nothing new."""
