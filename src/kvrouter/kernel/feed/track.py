"""The position of one feed in its event stream, and its state transitions."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot, has_cleared
from kvrouter.core.ids import Epoch, EventId
from kvrouter.kernel.feed.inbox import Inbox
from kvrouter.kernel.feed.states import (
    Apply,
    AskRange,
    AskSnapshot,
    Command,
    Count,
    Empty,
    FeedCount,
    FeedLimits,
    FeedState,
    Load,
)


class AskKind(Enum):
    """The kind of an ask: a range of events, or a snapshot."""

    RANGE = auto()
    SNAPSHOT = auto()


@dataclass(frozen=True, slots=True)
class Ask:
    """The open ask; an answer with another ticket belongs to an abandoned ask.

    ``due_s``: when it times out; None until it was sent.
    """

    ticket: int
    kind: AskKind
    due_s: float | None = None


class Track:
    """The position of one feed: ``next_event_id`` of ``epoch`` is the first event that is not applied yet.

    ``is_complete``: no event before the position is lost. ``is_orphaned``: the index could not place a store,
    so only a snapshot helps. ``confirmed``: the epoch from discovery; ``verified``: the last epoch from
    discovery or a snapshot. ``retired``: ended epochs, whose batches are stale. While an ask is open the
    inbox keeps every batch that arrives, also those that a partial feed applies at once, because the answer
    may be older than they are. Without an ask it is empty. ``behind_since_s``: since when the worker's
    heartbeats have named ids below the position. ``is_contradicted``: they did so for too long, and no
    snapshot was loaded since. ``floor``: epoch and next id of the snapshot that answered the last
    contradiction: a heartbeat with a lower id is late. ``unreached``: the first held id that did not connect
    to the last snapshot.
    """

    __slots__ = (
        "ask",
        "behind_since_s",
        "confirmed",
        "epoch",
        "floor",
        "inbox",
        "is_complete",
        "is_contradicted",
        "is_orphaned",
        "limits",
        "next_event_id",
        "now_s",
        "orphans_rest_until_s",
        "out",
        "retired",
        "retry_s",
        "state",
        "tickets",
        "unreached",
        "verified",
    )

    def __init__(self, limits: FeedLimits) -> None:
        self.state = FeedState.RECOVERING
        self.epoch: Epoch | None = None
        self.next_event_id = EventId(0)
        self.limits = limits
        self.inbox = Inbox(events_max=limits.inbox_events_max, epochs_max=limits.epochs_max)
        self.retired: deque[Epoch] = deque(maxlen=limits.epochs_max)
        self.confirmed: Epoch | None = None
        self.verified: Epoch | None = None
        self.is_complete = False
        self.is_orphaned = False
        self.orphans_rest_until_s = float("-inf")
        self.ask: Ask | None = None
        self.tickets = 0
        self.behind_since_s: float | None = None
        self.is_contradicted = False
        self.floor: tuple[Epoch, EventId] | None = None
        self.unreached: EventId | None = None
        self.retry_s = float("inf")
        self.now_s = 0.0
        self.out: list[Command] = []

    @property
    def is_verified(self) -> bool:
        """Whether discovery or a snapshot reported the epoch; if not, the feed stays partial and retries."""
        return self.epoch == self.verified

    def is_ask_overdue(self) -> bool:
        """Whether the open ask has timed out."""
        return self.ask is not None and self.ask.due_s is not None and self.now_s >= self.ask.due_s

    def sent(self, ticket: int) -> None:
        """Start the timeout of the open ask, which is sent now."""
        if self.ask is not None and self.ask.ticket == ticket:
            is_range = self.ask.kind is AskKind.RANGE
            timeout_s = self.limits.range_timeout_s if is_range else self.limits.snapshot_timeout_s
            self.ask = replace(self.ask, due_s=self.now_s + timeout_s)

    def advance(self, batch: KvBatch) -> None:
        """Apply the new events of a batch that begins at or before the next id."""
        events = batch.events
        repeated = min(self.next_event_id - batch.first_event_id, len(events))
        if repeated:
            self.count(FeedCount.REPEATED_EVENTS, repeated)
            events = events[repeated:]
        self.apply(events)

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Apply the next events."""
        if not events:
            return
        self.out.append(Apply(events))
        self.next_event_id = EventId(self.next_event_id + len(events))
        if not self.is_complete and self.is_verified and has_cleared(events):
            self.is_complete = True  # events lost before a clear no longer matter

    def break_off(self, batch: KvBatch) -> None:
        """Hold ``batch`` and recover what precedes it; drop it if its epoch has ended."""
        if batch.epoch in self.retired:
            self.count(FeedCount.STALE_EPOCH_BATCHES)
            return
        is_gap = batch.epoch == self.epoch
        self.count(FeedCount.GAPS if is_gap else FeedCount.NEW_EPOCHS)
        self.inbox.add(batch, ticket=self.tickets)
        self.state = FeedState.RECOVERING
        if self.ask is not None:
            return
        if is_gap:
            self.ask_gap()
        else:
            self.ask_snapshot()

    def is_contradicted_by(self, batch: KvBatch) -> bool:
        """Whether a heartbeat shows that some applied events were not the worker's.

        An answer may overtake a heartbeat in flight; a heartbeat ``behind_s`` later was probably not
        overtaken. If the stream lags by more it was, and the snapshot that is asked for has the higher id.
        """
        if batch.events:
            return False
        if self.floor is not None and self.floor[0] == batch.epoch and batch.first_event_id < self.floor[1]:
            return False
        if batch.first_event_id == self.next_event_id:
            self.behind_since_s = None
            return False
        if self.behind_since_s is None:
            self.behind_since_s = self.now_s
        return self.now_s - self.behind_since_s >= self.limits.behind_s

    def restart(self) -> None:
        """Discard the position: only a snapshot is authoritative, whatever its id."""
        self.count(FeedCount.CONTRADICTIONS)
        self.behind_since_s = None
        self.is_contradicted = True
        self.next_event_id = EventId(0)
        self.is_complete, self.is_orphaned = False, True
        self.state = FeedState.RECOVERING
        self.inbox.clear()
        self.ask_snapshot()

    def rest_over_limit(self) -> None:
        """Drop all blocks of a rank that reported too many, and ignore it for ``over_limit_rest_s``."""
        self.count(FeedCount.OVER_LIMIT)
        self.out.append(Empty())
        self.inbox.clear()
        self.ask = None
        self.next_event_id = EventId(0)
        self.is_complete, self.is_orphaned = False, True
        self.state = FeedState.OVER_LIMIT
        self.retry_s = self.now_s + self.limits.over_limit_rest_s

    def can_carry_on(self) -> bool:
        """Whether the inbox closes the gap, so that no answer is needed."""
        return (
            self.epoch is not None
            and not self.is_orphaned
            and not self.inbox.has_other_than(self.epoch)
            and self.inbox.is_gapless(self.epoch, self.next_event_id)
        )

    def carry_on(self) -> None:
        """Apply the inbox's events from the next id on; then settle, or ask for the events still missing."""
        if self.epoch is not None:
            self.apply(self.inbox.take_run(self.epoch, self.next_event_id).events)
        if not self.inbox:
            self.settle()
            return
        self.state = FeedState.RECOVERING
        if self.epoch is not None and not self.inbox.has_other_than(self.epoch):
            self.ask_gap()
        else:
            self.ask_snapshot()

    def settle(self) -> None:
        """End the recovery: no event is missing (LIVE), or missing events are lost for good (PARTIAL)."""
        self.inbox.clear()
        self.ask = None
        self.state = FeedState.LIVE if self.is_complete else FeedState.PARTIAL
        self.retry_s = self.now_s + self.limits.snapshot_retry_s

    def is_usable(self, snapshot: KvSnapshot) -> bool:
        """Whether a snapshot can be loaded: its epoch has not ended, and it loses no applied event, because
        it is at the position or the inbox has the events from its id to there.
        """
        if snapshot.epoch != self.epoch:
            is_doubtful = self.is_verified and self.epoch is not None and self.epoch == self.confirmed
            if is_doubtful and not self.inbox.has(snapshot.epoch):
                return False  # discovery knows that its process has ended, and no batch contradicts that
            return snapshot.epoch not in self.retired
        return self.inbox.reach(snapshot.epoch, snapshot.next_event_id) >= self.next_event_id

    def load(self, snapshot: KvSnapshot, *, ticket: int) -> None:
        """Restart from ``snapshot``, the answer to ``ticket``.

        Epochs that arrived before that ask, and did not answer it, have ended.
        """
        for epoch in self.inbox.epochs_known_before(ticket):
            if epoch != snapshot.epoch:
                self.retire(epoch)
        if self.epoch is not None and self.epoch != snapshot.epoch and not self.inbox.has(self.epoch):
            self.retire(self.epoch)
        self.out.append(Load(snapshot))
        self.count(FeedCount.SNAPSHOTS_LOADED)
        self.epoch, self.next_event_id = snapshot.epoch, snapshot.next_event_id
        self.verified = snapshot.epoch
        self.is_complete, self.is_orphaned = True, False
        self.orphans_rest_until_s = self.now_s + self.limits.snapshot_retry_s
        self.behind_since_s = None
        if self.is_contradicted:
            self.is_contradicted, self.floor = False, (snapshot.epoch, snapshot.next_event_id)
        self._drop_unreachable()
        self.carry_on()

    def _drop_unreachable(self) -> None:
        """Drop batches that did not connect to two snapshots in a row: earlier events never existed."""
        if self.epoch is None:
            return
        reach = self.inbox.reach(self.epoch, self.next_event_id)
        unreached = self.inbox.first_after(self.epoch, reach)
        if unreached is not None and unreached == self.unreached:
            self.count(FeedCount.CONTRADICTIONS)
            self.inbox.drop_from(self.epoch, unreached)
            unreached = None
        self.unreached = unreached

    def go_without_snapshot(self) -> None:
        """Continue without a snapshot, because no worker provides one; a recovering feed is emptied first."""
        if self.state is FeedState.PARTIAL:
            self.retry_later()
            return
        self.count(FeedCount.HISTORY_LOST)
        self.out.append(Empty())
        self.is_complete = self.is_orphaned = False
        epoch = self.inbox.latest_epoch
        if epoch is not None:
            if self.inbox.has_other_than(epoch):
                self.verified = None  # it is unknown which of two epochs has ended
            run = self.inbox.take_last_run(epoch)
            self.epoch, self.next_event_id = epoch, run.first
            self.is_complete = run.first == 0 and self.is_verified
            self.apply(run.events)
        self.settle()

    def retry_later(self) -> None:
        """Abandon the open ask of a partial feed, which asks again after ``snapshot_retry_s``."""
        self.ask = None
        self.inbox.clear()
        self.retry_s = self.now_s + self.limits.snapshot_retry_s

    def retire(self, epoch: Epoch) -> None:
        """Drop an epoch's batches, and mark it as ended unless discovery names it."""
        self.inbox.drop(epoch)
        if epoch != self.confirmed and epoch not in self.retired:
            self.retired.append(epoch)

    def close(self, ticket: int) -> bool:
        """Close the open ask if it has this ticket; return whether it does."""
        if self.ask is None or self.ask.ticket != ticket:
            self.count(FeedCount.ANSWERS_USELESS)
            return False
        self.ask = None
        return True

    def ask_gap(self) -> None:
        """Ask for the events before the first held batch: as a range, or as a snapshot when it is long."""
        first_held = self.inbox.first_id(self.epoch) if self.epoch is not None else None
        if first_held is None or first_held - self.next_event_id > self.limits.range_events_max:
            self.ask_snapshot()
            return
        ticket = self._open(AskKind.RANGE)
        self.count(FeedCount.RANGES_ASKED)
        self.out.append(AskRange(ticket, self.next_event_id, EventId(first_held - 1)))

    def ask_snapshot(self) -> None:
        """Ask for a snapshot, and abandon any other ask."""
        ticket = self._open(AskKind.SNAPSHOT)
        self.count(FeedCount.SNAPSHOTS_ASKED)
        self.out.append(AskSnapshot(ticket))

    def _open(self, kind: AskKind) -> int:
        self.tickets += 1
        self.ask = Ask(self.tickets, kind)
        return self.tickets

    def count(self, name: FeedCount, n: int = 1) -> None:
        """Add to a counter."""
        self.out.append(Count(name, n))

    def count_repeated(self, n: int) -> None:
        """Add to the repeated events; an empty batch repeats none."""
        if n:
            self.count(FeedCount.REPEATED_EVENTS, n)
