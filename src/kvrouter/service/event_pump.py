"""The service entrance: KV events from the event plane, through each rank's feed, into the index."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import KvBatch, KvEvent
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.feed.rank_feed import RankFeed
from kvrouter.feed.words import (
    Apply,
    AskRange,
    AskSnapshot,
    Command,
    Count,
    Empty,
    FeedState,
    Load,
)
from kvrouter.index.port import BlockIndex
from kvrouter.planes.events.port import EventSubscriber
from kvrouter.service.observed import ModelObserved

SILENT_AFTER_S = 15.0
"""A rank that was not heard for this long publishes no events: workers send heartbeats every 5 s."""


class FeedReading(NamedTuple):
    """A feed's state, for how long its blocks have not been known for sure, and the age of its last batch.

    ``silent_s``: since the last batch or heartbeat, else since the rank joined. Answers to questions do not
    count: a rank that only answers them is silent.
    """

    state: FeedState
    stale_s: float
    lag_s: float
    silent_s: float
    is_missing: bool


@dataclass(slots=True)
class _Entrance:
    """One rank's feed, and what runs for it."""

    feed: RankFeed
    slot: Slot
    heard_s: float
    is_missing: bool = False
    told: FeedState | None = None
    stale_since_s: float | None = None
    lag_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    ask: asyncio.Task[None] | None = None


class EventPump:
    """Feeds one model's index. Runs on the event loop; nothing here waits for a request.

    ``scores`` tells per slot whether its blocks count now: a rank whose feed recovers scores nothing.
    """

    def __init__(self, index: BlockIndex, subscriber: EventSubscriber, observed: ModelObserved) -> None:
        self._index = index
        self._subscriber = subscriber
        self._observed = observed
        self._entrances: dict[WorkerRank, _Entrance] = {}
        self._by_slot: dict[Slot, _Entrance] = {}
        self._scores: npt.NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._silent = 0
        self._silence_timer: asyncio.TimerHandle | None = None

    @property
    def all_score(self) -> bool:
        """True when no feed recovers: the common case, in which nothing need be masked."""
        return self._silent == 0

    def scores(self, n_slots: int) -> npt.NDArray[np.bool_]:
        """The mask over slots; False where there is no feed."""
        self._grow(n_slots)
        return self._scores[:n_slots]

    def feeds(self) -> Iterator[tuple[Slot, RankFeed]]:
        """Every rank's feed."""
        return ((entrance.slot, entrance.feed) for entrance in self._entrances.values())

    def feed_at(self, slot: Slot) -> RankFeed | None:
        """The feed whose blocks are at the slot now."""
        entrance = self._by_slot.get(slot)
        return None if entrance is None else entrance.feed

    def feed_readings(self) -> Iterator[tuple[Slot, FeedReading]]:
        """What there is to tell of each slot's feed."""
        now_s = self._now_s()
        for entrance in self._entrances.values():
            since_s = now_s if entrance.stale_since_s is None else entrance.stale_since_s
            yield (
                entrance.slot,
                FeedReading(
                    entrance.feed.state,
                    stale_s=now_s - since_s,
                    lag_s=entrance.lag_s,
                    silent_s=now_s - entrance.heard_s,
                    is_missing=entrance.is_missing,
                ),
            )

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """A worker rank was discovered: ask it for what it holds."""
        self._grow(slot + 1)
        now_s = self._now_s()
        entrance = self._entrances[rank] = self._by_slot[slot] = _Entrance(RankFeed(rank), slot, now_s)
        self._silent += 1
        self._watch_silence()
        self._after(entrance, entrance.feed.on_new_epoch(epoch, now_s=now_s))

    def freed(self, slot: Slot) -> None:
        """A slot has no worker rank any more: its blocks go, and so does what runs for it."""
        entrance = self._by_slot.pop(slot, None)
        if entrance is not None:
            self._stop(entrance)
            if self._entrances.get(entrance.feed.rank) is entrance:  # else the rank is at another slot by now
                del self._entrances[entrance.feed.rank]
            if not self._scores[slot]:
                self._silent -= 1
            self._scores[slot] = False
        self._index.drop(slot)

    def on_batch(self, batch: KvBatch) -> None:
        """A batch arrived; of a rank that is not known yet it is let go: a snapshot will have it."""
        entrance = self._entrances.get(batch.rank)
        if entrance is not None:
            if batch.published_s:
                entrance.lag_s = max(0.0, time.time() - batch.published_s)
            entrance.heard_s = now_s = self._now_s()
            entrance.is_missing = False
            self._after(entrance, entrance.feed.on_batch(batch, now_s=now_s))

    def close(self) -> None:
        """Stop everything that runs."""
        for entrance in self._entrances.values():
            self._stop(entrance)
        self._entrances.clear()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _after(self, entrance: _Entrance, commands: list[Command]) -> None:
        """Do what a feed said, until it says nothing more; then set its next timer."""
        orphaned = 0
        for command in commands:
            match command:
                case Apply(events):
                    orphaned += self._apply(entrance, events)
                case Empty():
                    self._index.drop(entrance.slot)
                case Load(snapshot):
                    self._observed.events_applied(self._index.load(entrance.slot, snapshot.events))
                case AskRange() | AskSnapshot():
                    self._ask(entrance, command)
                case Count(name, n):
                    self._observed.feed_counted(name, n)
        if orphaned:
            self._after(entrance, entrance.feed.on_orphan(now_s=self._now_s()))
            return
        self._note_state(entrance)
        self._set_timer(entrance)

    def _apply(self, entrance: _Entrance, events: tuple[KvEvent, ...]) -> int:
        try:
            applied = self._index.apply(entrance.slot, events)
        except ValueError as error:  # nothing of it was applied: as unknown as after a lost parent
            self._observed.mistaken_events(entrance.feed.rank, str(error))
            return 1
        self._observed.events_applied(applied)
        return applied.orphaned

    def _note_state(self, entrance: _Entrance) -> None:
        if entrance.feed.state is FeedState.LIVE:
            entrance.stale_since_s = None
        elif entrance.stale_since_s is None:
            entrance.stale_since_s = self._now_s()
        state = entrance.feed.state
        if state is entrance.told:
            return
        entrance.told = state
        self._observed.feed_changed(entrance.feed.rank, state)
        scores = state is not FeedState.RECOVERING
        if scores != self._scores[entrance.slot]:
            self._scores[entrance.slot] = scores
            self._silent += -1 if scores else 1

    def _set_timer(self, entrance: _Entrance) -> None:
        due_s = entrance.feed.next_timeout_s
        if entrance.timer is not None:
            if due_s is not None and entrance.timer.when() == due_s:
                return
            entrance.timer.cancel()
            entrance.timer = None
        if due_s is not None:
            loop = asyncio.get_running_loop()
            entrance.timer = loop.call_at(due_s, self._timed_out, entrance)

    def _timed_out(self, entrance: _Entrance) -> None:
        entrance.timer = None
        self._after(entrance, entrance.feed.on_timeout(now_s=self._now_s()))

    def _ask(self, entrance: _Entrance, command: AskRange | AskSnapshot) -> None:
        """Ask the worker; an older question that is still open has been given up by the feed."""
        if entrance.ask is not None:
            entrance.ask.cancel()
        entrance.ask = asyncio.get_running_loop().create_task(self._answer(entrance, command))
        entrance.ask.add_done_callback(self._answered)

    async def _answer(self, entrance: _Entrance, command: AskRange | AskSnapshot) -> None:
        feed = entrance.feed
        try:
            if isinstance(command, AskRange):
                batch = await self._subscriber.recover_range(feed.rank, command.first, command.last)
                commands = feed.on_range(command.ticket, batch, now_s=self._now_s())
            else:
                snapshot = await self._subscriber.recover_snapshot(feed.rank)
                commands = feed.on_snapshot(command.ticket, snapshot, now_s=self._now_s())
        except (KvrouterError, OSError, ValueError) as error:
            self._observed.recovery_failed(feed.rank, str(error))
            return  # the feed's own timer asks again
        if entrance.ask is asyncio.current_task():
            entrance.ask = None
        self._after(entrance, commands)

    def _answered(self, task: asyncio.Task[None]) -> None:
        """A mistake of ours in the task must not vanish; the feed's timer asks again."""
        if not task.cancelled() and task.exception() is not None:
            self._observed.mistake_in_recovery(task.exception())

    def _watch_silence(self) -> None:
        if self._silence_timer is None and self._entrances:
            loop = asyncio.get_running_loop()
            self._silence_timer = loop.call_later(SILENT_AFTER_S / 3.0, self._look_for_silence)

    def _look_for_silence(self) -> None:
        self._silence_timer = None
        now_s = self._now_s()
        for rank, entrance in self._entrances.items():
            silent_s = now_s - entrance.heard_s
            if silent_s > SILENT_AFTER_S and not entrance.is_missing:
                entrance.is_missing = True
                self._observed.kv_events_missing(rank, silent_s)
        self._watch_silence()

    def _grow(self, n_slots: int) -> None:
        if n_slots > len(self._scores):
            grown = np.zeros(max(n_slots, 2 * len(self._scores)), np.bool_)
            grown[: len(self._scores)] = self._scores
            self._scores = grown

    @staticmethod
    def _stop(entrance: _Entrance) -> None:
        if entrance.timer is not None:
            entrance.timer.cancel()
        if entrance.ask is not None:
            entrance.ask.cancel()
