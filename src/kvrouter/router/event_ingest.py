"""Event ingest: KV events go from the event transport through each rank's feed into the index. Also the cache
view on that index.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import Held, KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import AskRange, AskSnapshot, Command, FeedCount, FeedState
from kvrouter.kernel.index import BlockIndex
from kvrouter.router.feed_commands import FeedCommands, uncounted
from kvrouter.router.index_work import IndexWork, Steps, empty, listed
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.router.rank_ingest import Capacity, RankIngest, loop_time_s
from kvrouter.transports.events.port import AnswerTooLarge, EventSubscriber

T = TypeVar("T")

SILENT_AFTER_S = 15.0
"""A rank without any message for this long publishes no events: workers send heartbeats every 5 s."""

RANK_BLOCKS_MAX = 1 << 24
"""The most blocks accepted from one rank in one medium, whatever its card states."""

WORKER_BLOCKS_FACTOR = 4
"""The ranks of one worker together may hold this many times the maximum of one rank."""

SNAPSHOTS_ASKED_MAX = 32
"""The most snapshot requests at a time; the next is sent when the index has loaded an answer."""


class FeedReading(NamedTuple):
    """A feed's state, how long its blocks have been uncertain, and the age of its last batch.

    ``silent_s``: seconds since the last batch or heartbeat, or since the rank joined; answers to recovery
    requests do not count. ``clock_ahead_s``: how far the sender's wall clock is ahead of the local one, below
    0 for one that is behind; None before its first message.
    """

    state: FeedState
    stale_s: float
    lag_s: float
    silent_s: float
    is_missing: bool
    clock_ahead_s: float | None


class EventIngest:
    """Applies one model's KV events to its index, on the event loop. A request never waits for more than one
    step of this work, however many blocks a rank holds.

    ``scores`` is a mask over slots: a rank whose feed recovers does not score. A rank that reports more
    blocks than its worker states, with some slack, or than ``rank_blocks_max``, is emptied.
    ``clock`` gives the time of feeds and their timers, in seconds.
    """

    def __init__(
        self,
        index: BlockIndex,
        subscriber: EventSubscriber,
        instrumentation: ModelInstrumentation,
        *,
        rank_blocks_max: int = RANK_BLOCKS_MAX,
        snapshots_asked_max: int = SNAPSHOTS_ASKED_MAX,
        clock: Callable[[], float] = loop_time_s,
    ) -> None:
        self._clock = clock
        self._index = index
        self._rank_blocks_max = rank_blocks_max
        self._subscriber = subscriber
        self._instrumentation = instrumentation
        self._commands = FeedCommands(index, instrumentation, self._ask, clock)
        self._work = IndexWork(self._caught_up, self._fell_behind)
        self._snapshots = asyncio.Semaphore(snapshots_asked_max)
        self._rank_ingests: dict[WorkerRank, RankIngest] = {}
        self._by_slot: dict[Slot, RankIngest] = {}
        self._scores: npt.NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._silent = 0
        self._silence_timer: asyncio.TimerHandle | None = None
        self._awake = AwakeClock(SILENT_AFTER_S / 3.0)
        self._silence_checked_s = 0.0
        self._is_postponed = False

    @property
    def all_score(self) -> bool:
        """Whether every feed scores, so that no mask is needed; the common case."""
        return self._silent == 0

    def scores(self, n_slots: int) -> npt.NDArray[np.bool_]:
        """Which slots score; False for a slot without a feed."""
        self._grow(n_slots)
        return self._scores[:n_slots]

    def feeds(self) -> Iterator[tuple[Slot, RankFeed]]:
        """Every rank's slot and feed."""
        return ((ingest.slot, ingest.feed) for ingest in self._rank_ingests.values())

    def feed_at(self, slot: Slot) -> RankFeed | None:
        """The feed of the slot's rank; None where there is none."""
        ingest = self._by_slot.get(slot)
        return None if ingest is None else ingest.feed

    def feed_readings(self) -> Iterator[tuple[Slot, FeedReading]]:
        """Every feed's slot and reading."""
        now_s = self._clock()
        for ingest in self._rank_ingests.values():
            since_s = now_s if ingest.stale_since_s is None else ingest.stale_since_s
            yield (
                ingest.slot,
                FeedReading(
                    ingest.state,
                    stale_s=now_s - since_s,
                    lag_s=ingest.lag_s,
                    silent_s=now_s - ingest.last_message_s,
                    is_missing=ingest.is_missing,
                    clock_ahead_s=ingest.clock.ahead_s,
                ),
            )

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Add the feed of a discovered worker rank, and request its snapshot."""
        self._grow(slot + 1)
        now_s = self._clock()
        ingest = self._rank_ingests[rank] = self._by_slot[slot] = RankIngest(
            RankFeed(rank), slot, now_s, capacity=Capacity.of(None, blocks_max=self._rank_blocks_max)
        )
        self._silent += 1
        self._watch_silence()
        self._run(ingest, self._commands.begin(ingest, epoch))

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int = 1) -> None:
        """Set how many blocks the slot's rank can hold on its GPU; None where its worker does not state it.

        A worker's ``n_ranks`` ranks have equal shares of the maximum for one worker.
        """
        ingest = self._by_slot.get(slot)
        if ingest is not None:
            share = WORKER_BLOCKS_FACTOR * self._rank_blocks_max // n_ranks
            ingest.capacity = Capacity.of(total_blocks, blocks_max=min(self._rank_blocks_max, share))

    def freed(self, slot: Slot) -> None:
        """Remove the slot's feed, its running work and its blocks: its rank has left."""
        ingest = self._by_slot.pop(slot, None)
        if ingest is not None:
            self._stop(ingest)
            if self._rank_ingests.get(ingest.feed.rank) is ingest:  # else the rank has another slot by now
                del self._rank_ingests[ingest.feed.rank]
            if not ingest.is_scoring:
                self._silent -= 1
            self._scores[slot] = False
        self._work.run(slot, empty(self._index, slot, uncounted))

    def on_batch(self, batch: KvBatch) -> None:
        """Take a batch. A batch of an unknown rank is dropped: the rank's first snapshot will contain it."""
        ingest = self._rank_ingests.get(batch.rank)
        if ingest is None:
            return
        ingest.last_message_s = self._clock()
        if batch.published_s:
            ahead_s = batch.published_s - time.time()
            ingest.lag_s = max(0.0, -ahead_s)
            ingest.clock.note(ahead_s, now_s=ingest.last_message_s)
        ingest.is_missing = False
        if ingest.idle.is_set():
            self._after(ingest, self._commands.taken(ingest, batch))
        elif not ingest.waiting.add(batch):
            self._instrumentation.feed_counted(FeedCount.INBOX_FULL, 1)

    def doubt(self, slot: Slot) -> None:
        """Request a snapshot of the slot's rank: its engine's answers contradict the index.

        Does nothing while the index is working for the rank: the caller calls again while the contradiction
        lasts.
        """
        ingest = self._by_slot.get(slot)
        if ingest is not None and ingest.idle.is_set():
            self._after(ingest, ingest.feed.on_doubt(now_s=self._clock()))

    async def snapshot(self, slot: Slot) -> KvSnapshot | None:
        """Read the blocks of the slot's rank step by step; batches that arrive meanwhile wait.

        Returns None where the blocks are not certain, or the rank leaves meanwhile.
        """
        ingest = self._by_slot.get(slot)
        if ingest is None or not ingest.idle.is_set():
            return None
        feed, held = ingest.feed, list[Held]()
        epoch, next_event_id = feed.epoch, feed.next_event_id
        if feed.state is not FeedState.LIVE or epoch is None:
            return None
        ended = asyncio.Event()
        if not self._work.run(slot, _to_the_end(listed(self._index, slot, held), ended)):
            ingest.idle.clear()
            await ingest.idle.wait()
            if self._by_slot.get(slot) is not ingest or not ended.is_set():
                return None
        return KvSnapshot(feed.rank, epoch, next_event_id, tuple(held))

    def close(self) -> None:
        """Stop all feeds, timers and index work."""
        for ingest in self._rank_ingests.values():
            self._stop(ingest)
        self._rank_ingests.clear()
        self._by_slot.clear()
        self._work.close()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def _after(self, ingest: RankIngest, commands: list[Command]) -> None:
        """Carry out a feed's commands and those that follow, then set its next timer."""
        self._run(ingest, self._commands.carry_out(ingest, commands))

    def _run(self, ingest: RankIngest, steps: Steps) -> None:
        """Do the first step now; if more are left, the rank does not score until the last."""
        if self._work.run(ingest.slot, steps):
            self._settle(ingest)
            return
        ingest.idle.clear()
        ingest.is_behind = True
        if ingest.is_scoring:
            self._score(ingest, False)

    def _caught_up(self, slot: Slot) -> None:
        """Take up the batches that waited: the index has caught up with the slot's feed."""
        ingest = self._by_slot.get(slot)
        if ingest is None:
            return
        ingest.is_behind = False
        ingest.idle.set()
        self._after(ingest, [])

    def _fell_behind(self, slot: Slot) -> None:
        """Request a snapshot after an internal error: it is unknown which events the index has applied."""
        ingest = self._by_slot.get(slot)
        if ingest is not None:
            ingest.is_behind = False
            ingest.idle.set()
            self._after(ingest, ingest.feed.on_orphan(now_s=self._clock()))

    def _settle(self, ingest: RankIngest) -> None:
        if ingest.ask is not None and not ingest.feed.is_asking:
            ingest.ask.cancel()
            ingest.ask = None
        self._note_state(ingest)
        self._set_timer(ingest)

    def _note_state(self, ingest: RankIngest) -> None:
        state = ingest.feed.state
        if state is FeedState.LIVE:
            ingest.stale_since_s = None
        elif ingest.stale_since_s is None:
            ingest.stale_since_s = self._clock()
        if state is not ingest.reported:
            ingest.reported = state
            self._instrumentation.feed_changed(ingest.feed.rank, state)
        if ingest.scores is not ingest.is_scoring:
            self._score(ingest, ingest.scores)

    def _score(self, ingest: RankIngest, scores: bool) -> None:
        ingest.is_scoring = scores
        self._scores[ingest.slot] = scores
        self._silent += -1 if scores else 1

    def _set_timer(self, ingest: RankIngest) -> None:
        due_s = ingest.feed.next_timeout_s
        if ingest.timer is not None:
            if due_s is not None and ingest.timer.when() == due_s:
                return
            ingest.timer.cancel()
            ingest.timer = None
        if due_s is not None:
            loop = asyncio.get_running_loop()
            ingest.timer = loop.call_at(due_s, self._timed_out, ingest)

    def _timed_out(self, ingest: RankIngest) -> None:
        ingest.timer = None
        if ingest.idle.is_set():  # else _settle() sets it again after the index's work
            self._after(ingest, ingest.feed.on_timeout(now_s=self._clock()))

    def _ask(self, ingest: RankIngest, command: AskRange | AskSnapshot) -> None:
        """Send a recovery request; an open older one is cancelled, since the feed has given it up."""
        if ingest.ask is not None:
            ingest.ask.cancel()
        ingest.ask = asyncio.get_running_loop().create_task(self._answer(ingest, command))
        ingest.ask.add_done_callback(self._answered)

    async def _answer(self, ingest: RankIngest, command: AskRange | AskSnapshot) -> None:
        feed, ticket, subscriber = ingest.feed, command.ticket, self._subscriber
        if isinstance(command, AskRange):
            asked = subscriber.recover_range(feed.rank, command.first, command.last)
            batch = await self._asked(ingest, ticket, asked)
            await _is_ready(ingest)
            self._after(ingest, feed.on_range(ticket, batch, now_s=self._clock()))
            return
        async with self._snapshots:
            question = subscriber.recover_snapshot(feed.rank, blocks_max=ingest.capacity.total)
            try:
                snapshot = await self._asked(ingest, ticket, question)
            except AnswerTooLarge as error:
                await _is_ready(ingest)
                self._instrumentation.kv_events_over_limit(feed.rank, error.message)
                self._after(ingest, feed.on_overfilled(now_s=self._clock()))
                return
            await _is_ready(ingest)
            self._after(ingest, feed.on_snapshot(ticket, snapshot, now_s=self._clock()))
            await ingest.idle.wait()  # the next snapshot is requested once the index has this one

    async def _asked(
        self, ingest: RankIngest, ticket: int, question: Coroutine[None, None, T | None]
    ) -> T | None:
        """Send ``question`` and return its answer; None for one that failed or cannot be read.

        Raises AnswerTooLarge.
        """
        ingest.feed.on_asked(ticket, now_s=self._clock())
        self._set_timer(ingest)
        try:
            return await question
        except AnswerTooLarge:
            raise
        except (KvrouterError, OSError, ValueError) as error:
            self._instrumentation.recovery_failed(ingest.feed.rank, str(error))
            return None

    def _answered(self, task: asyncio.Task[None]) -> None:
        """Log an internal error in the task; the feed's timer sends the request again."""
        if not task.cancelled() and task.exception() is not None:
            self._instrumentation.internal_error_in_recovery(task.exception())

    def _watch_silence(self) -> None:
        if self._silence_timer is None and self._rank_ingests:
            loop = asyncio.get_running_loop()
            self._silence_timer = loop.call_later(self._awake.every_s, self._check_silence)
            self._silence_checked_s = self._clock()

    def _check_silence(self) -> None:
        self._silence_timer = None
        now_s = self._clock()
        elapsed_s, self._silence_checked_s = now_s - self._silence_checked_s, now_s
        # after a pause messages are read only after this; a second one in a row postpones nothing
        self._is_postponed = self._awake.advance(elapsed_s) and not self._is_postponed
        for rank, ingest in self._rank_ingests.items():
            silent_s = now_s - ingest.last_message_s
            if silent_s > SILENT_AFTER_S and not ingest.is_missing and not self._is_postponed:
                ingest.is_missing = True
                self._instrumentation.kv_events_missing(rank, silent_s)
        self._watch_silence()

    def _grow(self, n_slots: int) -> None:
        if n_slots > len(self._scores):
            grown = np.zeros(max(n_slots, 2 * len(self._scores)), np.bool_)
            grown[: len(self._scores)] = self._scores
            self._scores = grown

    def _stop(self, ingest: RankIngest) -> None:
        if ingest.timer is not None:
            ingest.timer.cancel()
        if ingest.ask is not None:
            ingest.ask.cancel()
        self._work.give_up(ingest.slot)
        ingest.idle.set()


async def _is_ready(ingest: RankIngest) -> None:
    """Wait until the feed may take the answer that the current task holds."""
    while not ingest.idle.is_set():
        await ingest.idle.wait()
    if ingest.ask is asyncio.current_task():
        ingest.ask = None


def _to_the_end(steps: Steps, ended: asyncio.Event) -> Steps:
    """Take the steps; set ``ended`` unless one of them failed or they were given up."""
    yield from steps
    ended.set()
