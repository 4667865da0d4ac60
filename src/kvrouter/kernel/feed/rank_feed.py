"""The state machine of one rank's event stream, as one table: (state, input) → next state and commands.

::

        ┌────────── the range, the missing batch, a snapshot ─────────┐
        ▼                                                              │
      LIVE ───────── gap, another epoch, orphan ────────────────▶ RECOVERING ◀── a feed begins here
        ▲                                                           │    ▲
        └── a snapshot, a clear, ids from 0 ── PARTIAL ◀─ nothing ──┘    │
                                                  │   (emptied first)    │
                                                  └─ gap, another epoch ─┘

A missing store costs a cache hit; a missing removal sends requests to blocks that are gone. So blocks do not
count as overlap while events are missing, and when events are lost for good, all blocks are dropped before
the feed counts again.

From any state, a rank that reports more blocks than its worker can hold enters ``OVER_LIMIT``: its blocks are
dropped, and it recovers after a rest.

Batches of a rank may be lost, repeated and reordered, also across a restart of the worker. Epochs have no
order, so a batch of another epoch does not prove a restart: the worker's snapshot, or discovery, decides.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, WorkerRank
from kvrouter.kernel.feed.inbox import Added
from kvrouter.kernel.feed.states import (
    Command,
    Empty,
    FeedCount,
    FeedLimits,
    FeedState,
    Input,
    NewEpoch,
    Orphaned,
    Overfilled,
    RangeAnswer,
    SnapshotAnswer,
    Ticked,
)
from kvrouter.kernel.feed.track import AskKind, Track


class RankFeed:
    """Turns the messages of one worker rank into commands for its driver.

    ``now_s`` is seconds of one monotonic clock. The driver executes the commands in order before its next
    call. It reports when each ask is sent, and passes in its answer with its ticket, or lets it time out.
    """

    __slots__ = ("_track", "rank")

    def __init__(self, rank: WorkerRank, *, limits: FeedLimits | None = None) -> None:
        self.rank = rank
        self._track = Track(limits or FeedLimits())

    @property
    def state(self) -> FeedState:
        """How far the applied events can be trusted."""
        return self._track.state

    @property
    def scores(self) -> bool:
        """Whether the rank's blocks currently count as overlap."""
        return self._track.state in (FeedState.LIVE, FeedState.PARTIAL)

    @property
    def epoch(self) -> Epoch | None:
        """The epoch of the last applied events; None before the first."""
        return self._track.epoch

    @property
    def next_event_id(self) -> EventId:
        """The first id of ``epoch`` that is not applied yet."""
        return self._track.next_event_id

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited; if not, the driver can cancel an ask that is in flight."""
        return self._track.ask is not None

    @property
    def next_timeout_s(self) -> float | None:
        """When to call :meth:`on_timeout` next; None while no timeout is pending."""
        track = self._track
        if track.ask is not None:
            return track.ask.due_s
        return track.retry_s if track.state in (FeedState.PARTIAL, FeedState.OVER_LIMIT) else None

    def on_batch(self, batch: KvBatch, *, now_s: float) -> list[Command]:
        """Handle a batch. An empty batch, a heartbeat, has the next id and so reveals a lost tail."""
        return self._handle(batch, now_s)

    def on_asked(self, ticket: int, *, now_s: float) -> None:
        """Record that an ask was sent: its timeout starts now, perhaps long after the ask was made."""
        self._track.now_s = now_s
        self._track.sent(ticket)

    def on_range(self, ticket: int, batch: KvBatch | None, *, now_s: float) -> list[Command]:
        """Handle the answer to :class:`AskRange`; None for no answer."""
        return self._handle(RangeAnswer(ticket, batch), now_s)

    def on_snapshot(self, ticket: int, snapshot: KvSnapshot | None, *, now_s: float) -> list[Command]:
        """Handle the answer to :class:`AskSnapshot`; None for no answer."""
        return self._handle(SnapshotAnswer(ticket, snapshot), now_s)

    def on_new_epoch(self, epoch: Epoch, *, now_s: float) -> list[Command]:
        """Handle the worker's epoch from discovery, which starts a feed and ends an earlier epoch."""
        return self._handle(NewEpoch(epoch), now_s)

    def on_orphan(self, *, now_s: float) -> list[Command]:
        """Handle a store that the index could not place: an event was lost before it got an id."""
        return self._handle(Orphaned(), now_s)

    def on_doubt(self, *, now_s: float) -> list[Command]:
        """Handle an engine's answer that contradicts the index."""
        return self._handle(Orphaned(FeedCount.DOUBTS), now_s)

    def on_contradiction(self, *, now_s: float) -> list[Command]:
        """Handle a heartbeat whose number of blocks differs from the index at the same id."""
        return self._handle(Orphaned(FeedCount.CONTRADICTIONS), now_s)

    def on_overfilled(self, *, now_s: float) -> list[Command]:
        """Handle that the index has more blocks of the rank than its worker can hold."""
        return self._handle(Overfilled(), now_s)

    def on_timeout(self, *, now_s: float) -> list[Command]:
        """Handle a timeout; no effect when none is due."""
        return self._handle(Ticked(), now_s)

    def _handle(self, event: Input, now_s: float) -> list[Command]:
        track = self._track
        out: list[Command] = []
        track.now_s, track.out = now_s, out
        TABLE[track.state, type(event)](track, event)
        return out


def _ignore(track: Track, _event: Input) -> None:
    """Ignore the input."""


def _batch_live(track: Track, batch: KvBatch) -> None:
    if batch.epoch != track.epoch or batch.first_event_id > track.next_event_id:
        track.break_off(batch)
    elif track.is_contradicted_by(batch):
        track.restart()
    else:
        track.advance(batch)


def _batch_partial(track: Track, batch: KvBatch) -> None:
    if batch.epoch != track.epoch or batch.first_event_id > track.next_event_id:
        track.break_off(batch)
        return
    if track.is_contradicted_by(batch):
        track.restart()
        return
    if track.ask is not None and track.inbox.add(batch, ticket=track.tickets) is Added.KEPT_AND_FULL:
        track.count(FeedCount.INBOX_FULL)
        track.retry_later()
    track.is_complete = track.next_event_id == 0 and track.is_verified  # nothing came before this batch
    track.advance(batch)
    if track.is_complete:
        track.settle()


def _batch_recovering(track: Track, batch: KvBatch) -> None:
    if batch.epoch in track.retired:
        track.count(FeedCount.STALE_EPOCH_BATCHES)
        return
    if batch.epoch == track.epoch and batch.next_event_id <= track.next_event_id:
        track.count_repeated(len(batch.events))
        return
    is_foreign = track.epoch is not None and batch.epoch != track.epoch
    if is_foreign and not track.inbox.has(batch.epoch):
        track.count(FeedCount.NEW_EPOCHS)
    added = track.inbox.add(batch, ticket=track.tickets)
    if added is Added.REPEATED:
        track.count_repeated(len(batch.events))
        return
    if added is Added.KEPT_AND_FULL:
        track.count(FeedCount.INBOX_FULL)
    needs_snapshot = is_foreign or added is Added.KEPT_AND_FULL
    if track.ask is None or (track.ask.kind is AskKind.RANGE and needs_snapshot):
        track.ask_snapshot()
    elif track.can_carry_on():
        track.carry_on()


def _range_recovering(track: Track, answer: RangeAnswer) -> None:
    if not track.close(answer.ticket):
        return
    batch = answer.batch
    if batch is None or batch.epoch != track.epoch or batch.first_event_id > track.next_event_id:
        if batch is not None:
            track.count(FeedCount.ANSWERS_USELESS)
        track.ask_snapshot()
        return
    before = track.next_event_id
    track.advance(batch)
    if track.next_event_id == before:
        track.ask_snapshot()
    else:
        track.carry_on()


def _snapshot(track: Track, answer: SnapshotAnswer) -> None:
    if not track.close(answer.ticket):
        return
    snapshot = answer.snapshot
    if snapshot is not None and track.is_usable(snapshot):
        track.load(snapshot, ticket=answer.ticket)
        return
    if snapshot is not None:
        track.count(FeedCount.ANSWERS_USELESS)
    track.go_without_snapshot()


def _answer_useless(track: Track, _answer: RangeAnswer | SnapshotAnswer) -> None:
    track.count(FeedCount.ANSWERS_USELESS)


def _new_epoch(track: Track, event: NewEpoch) -> None:
    track.confirmed = track.verified = event.epoch
    if event.epoch == track.epoch:
        return
    for epoch in track.inbox.epochs:
        if epoch != event.epoch:
            track.retire(epoch)
    if track.epoch is not None:
        track.count(FeedCount.NEW_EPOCHS)
        track.out.append(Empty())
        track.retire(track.epoch)
    if event.epoch in track.retired:
        track.retired.remove(event.epoch)
    track.epoch, track.next_event_id = event.epoch, EventId(0)
    track.is_complete, track.is_orphaned = True, False
    track.state = FeedState.RECOVERING
    if track.inbox and track.can_carry_on():
        track.carry_on()
    else:
        track.ask_snapshot()


def _orphan_live(track: Track, event: Orphaned) -> None:
    track.count(event.count)
    track.is_complete = False
    if track.now_s < track.orphans_rest_until_s:
        # A snapshot did not help a moment ago: the known blocks are still held, so they keep counting.
        track.state, track.retry_s = FeedState.PARTIAL, track.orphans_rest_until_s
    else:
        track.state, track.is_orphaned = FeedState.RECOVERING, True
        track.ask_snapshot()


def _orphan_recovering(track: Track, event: Orphaned) -> None:
    track.count(event.count)
    track.is_orphaned = True
    if track.ask is None or track.ask.kind is AskKind.RANGE:
        track.ask_snapshot()


def _orphan_partial(track: Track, event: Orphaned) -> None:
    track.count(event.count)


def _overfilled(track: Track, _event: Overfilled) -> None:
    track.rest_over_limit()


def _tick_over_limit(track: Track, _event: Ticked) -> None:
    if track.now_s >= track.retry_s:
        track.state = FeedState.RECOVERING
        track.ask_snapshot()


def _tick_recovering(track: Track, _event: Ticked) -> None:
    if track.ask is None or not track.is_ask_overdue():
        return
    track.count(FeedCount.ANSWERS_OVERDUE)
    if track.ask.kind is AskKind.RANGE:
        track.ask_snapshot()
    else:
        track.go_without_snapshot()


def _tick_partial(track: Track, _event: Ticked) -> None:
    if track.ask is None:
        if track.now_s >= track.retry_s:
            track.ask_snapshot()
    elif track.is_ask_overdue():
        track.count(FeedCount.ANSWERS_OVERDUE)
        track.go_without_snapshot()


# Each entry is reached only with the input type of its key.
_Row = Callable[[Track, Any], None]

TABLE: Mapping[tuple[FeedState, type[Input]], _Row] = {
    (FeedState.LIVE, KvBatch): _batch_live,
    (FeedState.LIVE, RangeAnswer): _answer_useless,
    (FeedState.LIVE, SnapshotAnswer): _answer_useless,
    (FeedState.LIVE, NewEpoch): _new_epoch,
    (FeedState.LIVE, Orphaned): _orphan_live,
    (FeedState.LIVE, Ticked): _ignore,
    (FeedState.RECOVERING, KvBatch): _batch_recovering,
    (FeedState.RECOVERING, RangeAnswer): _range_recovering,
    (FeedState.RECOVERING, SnapshotAnswer): _snapshot,
    (FeedState.RECOVERING, NewEpoch): _new_epoch,
    (FeedState.RECOVERING, Orphaned): _orphan_recovering,
    (FeedState.RECOVERING, Ticked): _tick_recovering,
    (FeedState.PARTIAL, KvBatch): _batch_partial,
    (FeedState.PARTIAL, RangeAnswer): _answer_useless,
    (FeedState.PARTIAL, SnapshotAnswer): _snapshot,
    (FeedState.PARTIAL, NewEpoch): _new_epoch,
    (FeedState.PARTIAL, Orphaned): _orphan_partial,
    (FeedState.PARTIAL, Ticked): _tick_partial,
    (FeedState.LIVE, Overfilled): _overfilled,
    (FeedState.RECOVERING, Overfilled): _overfilled,
    (FeedState.PARTIAL, Overfilled): _overfilled,
    (FeedState.OVER_LIMIT, Overfilled): _ignore,
    (FeedState.OVER_LIMIT, KvBatch): _ignore,
    (FeedState.OVER_LIMIT, RangeAnswer): _answer_useless,
    (FeedState.OVER_LIMIT, SnapshotAnswer): _answer_useless,
    (FeedState.OVER_LIMIT, NewEpoch): _new_epoch,
    (FeedState.OVER_LIMIT, Orphaned): _orphan_partial,
    (FeedState.OVER_LIMIT, Ticked): _tick_over_limit,
}
