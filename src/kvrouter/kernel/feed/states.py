"""The states, inputs and commands of a rank's feed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot
from kvrouter.core.ids import Epoch, EventId


class FeedState(Enum):
    """How far the applied events can be trusted.

    ``LIVE``: the index has exactly the blocks that the rank held at the last applied event. ``RECOVERING``:
    events are missing, perhaps removals, so blocks do not count as overlap until an answer arrives.
    ``PARTIAL``: the missing events are lost for good; earlier blocks were dropped, and the blocks stored
    since are a lower bound. ``OVER_LIMIT``: the rank reported more blocks than its worker can hold. They were
    dropped, its events are ignored, and after a rest the feed asks for a snapshot.
    """

    LIVE = auto()
    RECOVERING = auto()
    PARTIAL = auto()
    OVER_LIMIT = auto()


class FeedCount(StrEnum):
    """The counters of a feed, for metrics."""

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

    ``inbox_events_max``: the events kept while an answer is awaited; when full, all but the newest batch are
    dropped, and a snapshot replaces them. ``range_events_max``: a longer gap is recovered by a snapshot at
    once; the size of a publisher's ring. ``range_timeout_s``, ``snapshot_timeout_s``: the longest time from
    sending an ask to its answer; the driver gives up earlier when a transfer stalls. ``snapshot_retry_s``:
    the pause of a partial feed before it asks again, and the least time between two snapshots for orphans.
    ``epochs_max``: the number of ended epochs that are remembered, and of unconfirmed epochs that are
    buffered. ``behind_s``: when a worker's heartbeats have named ids below the applied ones for this long, it
    did not publish all applied events; less than the time between two heartbeats. ``over_limit_rest_s``: how
    long the events of a rank that reported too many blocks are ignored.
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
    """The answer to :class:`AskRange`; None when the worker no longer has the range or does not answer."""

    ticket: int
    batch: KvBatch | None


@dataclass(frozen=True, slots=True)
class SnapshotAnswer:
    """The answer to :class:`AskSnapshot`; None when no worker can answer."""

    ticket: int
    snapshot: KvSnapshot | None


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """Discovery reports that the worker restarted."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Orphaned:
    """An input: the index is wrong without a gap in the event ids. An event was lost, or an applied event was
    not the worker's. ``count`` is the evidence: ``ORPHANS``, a store with an unknown parent, which the index
    ignored; ``DOUBTS``, an engine's answer; ``CONTRADICTIONS``, a heartbeat.
    """

    count: FeedCount = FeedCount.ORPHANS


@dataclass(frozen=True, slots=True)
class Ticked:
    """A timeout may be due; see ``RankFeed.next_timeout_s``."""


@dataclass(frozen=True, slots=True)
class Overfilled:
    """The index has more blocks of the rank than its worker can hold."""


Input = KvBatch | RangeAnswer | SnapshotAnswer | NewEpoch | Orphaned | Overfilled | Ticked


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these events to the index, in order."""

    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class AskRange:
    """Ask the worker for the events ``first`` to ``last``, inclusive; the answer carries the ticket."""

    ticket: int
    first: EventId
    last: EventId


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask the worker for a snapshot; the answer carries the ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Drop every block of the rank: some may no longer exist."""


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
