"""The position of one feed in its stream, and its transitions."""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvrouter.core.events import Cleared, KvBatch, KvEvent, KvSnapshot
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


class Asked(Enum):
    """What an ask is for."""

    RANGE = auto()
    SNAPSHOT = auto()


@dataclass(frozen=True, slots=True)
class Ask:
    """The one question that is open; an answer with another ticket is to a question given up.

    ``due_s``: when its answer is taken for none; None until the question went out.
    """

    ticket: int
    what: Asked
    due_s: float | None = None


class Track:
    """The position of one feed: ``next_event_id`` of ``epoch`` is the first event that was not applied.

    ``is_complete``: nothing before the position is lost. ``is_orphaned``: the index could not place a store,
    so only a snapshot helps. ``confirmed``: the epoch that discovery named; ``verified``: the one that it or
    a snapshot named last. ``retired``: epochs that are over; what still arrives from them is stale. While an
    ask is open the inbox keeps every batch that arrives, also those that a partial feed applies at once: the
    answer may be older than they are. Without an ask it is empty. ``behind_since_s``: since when the worker's
    heartbeats name ids below the position. ``is_contradicted``: they did so for too long, and no snapshot was
    loaded since. ``floor``: epoch and next id of the snapshot that answered the last contradiction; its
    worker came that far, so a heartbeat with a lower id is late. ``unreached``: the first id held that the
    last snapshot did not lead up to.
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
        """Whether more than batches speak for the epoch; if not, a feed stays partial and asks again."""
        return self.epoch == self.verified

    def is_ask_overdue(self) -> bool:
        """Whether the open ask waits for too long."""
        return self.ask is not None and self.ask.due_s is not None and self.now_s >= self.ask.due_s

    def went_out(self, ticket: int) -> None:
        """The question goes out now: its answer's time counts from here."""
        if self.ask is not None and self.ask.ticket == ticket:
            is_range = self.ask.what is Asked.RANGE
            timeout_s = self.limits.range_timeout_s if is_range else self.limits.snapshot_timeout_s
            self.ask = replace(self.ask, due_s=self.now_s + timeout_s)

    def advance(self, batch: KvBatch) -> None:
        """Apply what is new in a batch that begins at or before the next id."""
        events = batch.events
        repeated = min(self.next_event_id - batch.first_event_id, len(events))
        if repeated:
            self.count(FeedCount.REPEATED_EVENTS, repeated)
            events = events[repeated:]
        self.apply(events)

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        """Apply the events that follow."""
        if not events:
            return
        self.out.append(Apply(events))
        self.next_event_id = EventId(self.next_event_id + len(events))
        if not self.is_complete and self.is_verified and any(isinstance(event, Cleared) for event in events):
            self.is_complete = True  # what was lost before a clear no longer matters

    def break_off(self, batch: KvBatch) -> None:
        """Stop scoring: events before ``batch`` are missing, or it is of another epoch."""
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
        """Whether ``batch`` shows that not all that was applied was the worker's.

        A heartbeat on its way may be overtaken by an answer; one that comes ``behind_s`` later probably was
        not. It was when the stream lags by more: then the snapshot that is asked for names the higher id.
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
        """Trust nothing of what was applied: only a snapshot is authoritative, whatever its id."""
        self.count(FeedCount.CONTRADICTIONS)
        self.behind_since_s = None
        self.is_contradicted = True
        self.next_event_id = EventId(0)
        self.is_complete, self.is_orphaned = False, True
        self.state = FeedState.RECOVERING
        self.inbox.clear()
        self.ask_snapshot()

    def rest_over_limit(self) -> None:
        """Drop everything of a rank that reported too much, and leave it alone for a while."""
        self.count(FeedCount.OVER_LIMIT)
        self.out.append(Empty())
        self.inbox.clear()
        self.ask = None
        self.next_event_id = EventId(0)
        self.is_complete, self.is_orphaned = False, True
        self.state = FeedState.OVER_LIMIT
        self.retry_s = self.now_s + self.limits.over_limit_rest_s

    def can_carry_on(self) -> bool:
        """Whether the inbox repairs everything by itself, so that no answer is needed."""
        return (
            self.epoch is not None
            and not self.is_orphaned
            and not self.inbox.has_other_than(self.epoch)
            and self.inbox.is_gapless(self.epoch, self.next_event_id)
        )

    def carry_on(self) -> None:
        """Apply what the inbox has from the next id on; then score, or ask for what is still missing."""
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
        """Score again: nothing is missing, or what is missing is lost for good."""
        self.inbox.clear()
        self.ask = None
        self.state = FeedState.LIVE if self.is_complete else FeedState.PARTIAL
        self.retry_s = self.now_s + self.limits.snapshot_retry_s

    def is_of_use(self, snapshot: KvSnapshot) -> bool:
        """Not of an epoch that is over, and no older than what was applied and can't be applied again."""
        if snapshot.epoch != self.epoch:
            is_doubtful = self.is_verified and self.epoch is not None and self.epoch == self.confirmed
            if is_doubtful and not self.inbox.has(snapshot.epoch):
                return False  # from a process that discovery knows to be over, and no batch contradicts it
            return snapshot.epoch not in self.retired
        return self.inbox.reach(snapshot.epoch, snapshot.next_event_id) >= self.next_event_id

    def load(self, snapshot: KvSnapshot, *, ticket: int) -> None:
        """Start over from ``snapshot``, the answer to ``ticket``.

        Epochs that were met before that ask, and did not answer it, are over.
        """
        for epoch in self.inbox.epochs_seen_before(ticket):
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
        """Drop batches up to which two snapshots in a row do not lead: the worker never published what
        would come before them.
        """
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
        """No one can provide the whole state. A partial feed goes on; a recovering one is emptied first."""
        if self.state is FeedState.PARTIAL:
            self.retry_later()
            return
        self.count(FeedCount.HISTORY_LOST)
        self.out.append(Empty())
        self.is_complete = self.is_orphaned = False
        epoch = self.inbox.latest_epoch
        if epoch is not None:
            if self.inbox.has_other_than(epoch):
                self.verified = None  # two epochs, and no one to say which is over
            run = self.inbox.take_last_run(epoch)
            self.epoch, self.next_event_id = epoch, run.first
            self.is_complete = run.first == 0 and self.is_verified
            self.apply(run.events)
        self.settle()

    def retry_later(self) -> None:
        """Give up the open ask of a partial feed; it asks again after a while."""
        self.ask = None
        self.inbox.clear()
        self.retry_s = self.now_s + self.limits.snapshot_retry_s

    def retire(self, epoch: Epoch) -> None:
        """Forget an epoch that is over; one that discovery named is over only when discovery says so."""
        self.inbox.drop(epoch)
        if epoch != self.confirmed and epoch not in self.retired:
            self.retired.append(epoch)

    def close(self, ticket: int) -> bool:
        """Whether ``ticket`` is the open ask, which it then is no more."""
        if self.ask is None or self.ask.ticket != ticket:
            self.count(FeedCount.ANSWERS_USELESS)
            return False
        self.ask = None
        return True

    def ask_gap(self) -> None:
        """Ask for what is missing before the first batch held: the range, or a snapshot when it is long."""
        first_held = self.inbox.first_id(self.epoch) if self.epoch is not None else None
        if first_held is None or first_held - self.next_event_id > self.limits.range_events_max:
            self.ask_snapshot()
            return
        ticket = self._open(Asked.RANGE)
        self.count(FeedCount.RANGES_ASKED)
        self.out.append(AskRange(ticket, self.next_event_id, EventId(first_held - 1)))

    def ask_snapshot(self) -> None:
        """Ask for everything; any other ask is given up."""
        ticket = self._open(Asked.SNAPSHOT)
        self.count(FeedCount.SNAPSHOTS_ASKED)
        self.out.append(AskSnapshot(ticket))

    def _open(self, what: Asked) -> int:
        self.tickets += 1
        self.ask = Ask(self.tickets, what)
        return self.tickets

    def count(self, name: FeedCount, n: int = 1) -> None:
        """Add to a counter."""
        self.out.append(Count(name, n))

    def count_repeated(self, n: int) -> None:
        """Add to the repeated events; an empty batch repeats none."""
        if n:
            self.count(FeedCount.REPEATED_EVENTS, n)
