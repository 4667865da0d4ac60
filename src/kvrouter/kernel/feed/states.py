"""The states, inputs and commands of a rank's feed."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot
from kvrouter.core.ids import Epoch, EventId


class FeedState(Enum):
    """How far what was applied can be trusted.

    ``LIVE``: exactly what the worker rank held at the last applied event. ``RECOVERING``: events are
    missing, a removal may be among them, so nothing counts as overlap until an answer comes. ``PARTIAL``:
    the missing events are lost for good; the blocks were dropped, and those stored since are held for
    certain: a lower bound. ``OVER_LIMIT``: it reported more blocks than its worker can hold. They were
    dropped, it is not listened to, and after a while it is asked for all that it holds.
    """

    LIVE = auto()
    RECOVERING = auto()
    PARTIAL = auto()
    OVER_LIMIT = auto()


class FeedCount(StrEnum):
    """What a feed counts for the metrics."""

    REPEATED_EVENTS = "repeated_events"
    GAPS = "gaps"
    NEW_EPOCHS = "new_epochs"
    RANGES_ASKED = "ranges_asked"
    SNAPSHOTS_ASKED = "snapshots_asked"
    SNAPSHOTS_LOADED = "snapshots_loaded"
    ANSWERS_OVERDUE = "answers_overdue"
    ANSWERS_USELESS = "answers_useless"
    STALE_EPOCH_BATCHES = "stale_epoch_batches"
    INBOX_FULL = "inbox_full"
    HISTORY_LOST = "history_lost"
    ORPHANS = "orphans"
    DOUBTS = "doubts"
    CONTRADICTIONS = "contradictions"
    OVER_LIMIT = "over_limit"


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """The limits of one feed.

    ``inbox_events_max``: events kept while an answer is awaited; when full, all but the newest batch are let
    go and a snapshot brings them back. ``range_events_max``: a longer gap is asked for as a snapshot at once;
    the size of a publisher's ring. ``range_timeout_s``, ``snapshot_timeout_s``: an answer that takes longer,
    from when its question went out, is taken for none; who asks gives up earlier when nothing comes any more.
    ``snapshot_retry_s``: how long a partial feed waits before it asks again, and the least time between two
    snapshots for orphans. ``epochs_max``: how many ended epochs are remembered, and how many unconfirmed ones
    are kept apart. ``behind_s``: a worker whose heartbeats name ids below what was applied for so long never
    published all of that; less than the time between two heartbeats. ``over_limit_rest_s``: how long a rank
    that reported too many blocks is not listened to.
    """

    inbox_events_max: int = 8192
    range_events_max: int = 1024
    range_timeout_s: float = 5.0
    snapshot_timeout_s: float = 60.0
    snapshot_retry_s: float = 10.0
    epochs_max: int = 8
    behind_s: float = 4.0
    over_limit_rest_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """What came back for :class:`AskRange`; None when the worker no longer has it or does not answer."""

    ticket: int
    batch: KvBatch | None


@dataclass(frozen=True, slots=True)
class SnapshotAnswer:
    """What came back for :class:`AskSnapshot`; None when there is no one to ask."""

    ticket: int
    snapshot: KvSnapshot | None


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """Discovery says that the worker restarted."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The index met a store whose parent it does not know, and did not place it; or, counted as ``DOUBTS``,
    the engine's own answers contradict the index; or, as ``CONTRADICTIONS``, its worker's heartbeat does.
    Either way an event was lost unseen, or was never the worker's.
    """

    count: FeedCount = FeedCount.ORPHANS


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; see ``RankFeed.next_timeout_s``."""


@dataclass(frozen=True, slots=True)
class Overfilled:
    """The index has more blocks of the rank than its worker can hold."""


Input = KvBatch | RangeAnswer | SnapshotAnswer | NewEpoch | Orphaned | Overfilled | Ticked


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these events to the index, in order."""

    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class AskRange:
    """Ask the worker for the events ``first`` to ``last``, inclusive; answer with the ticket."""

    ticket: int
    first: EventId
    last: EventId


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask the worker for its whole state; answer with the ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Drop every block of the rank: some may be gone."""


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the rank's blocks by the snapshot's."""

    snapshot: KvSnapshot


@dataclass(frozen=True, slots=True)
class Count:
    """Add ``n`` to a counter."""

    name: FeedCount
    n: int = 1


Command = Apply | AskRange | AskSnapshot | Empty | Load | Count
