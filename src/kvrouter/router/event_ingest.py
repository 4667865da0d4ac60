"""Event ingest: KV events from the transport, through each rank's feed, into the index; the cache view."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import Held, KvBatch, KvSnapshot
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import AskRange, AskSnapshot, Command, FeedCount, FeedState
from kvrouter.kernel.index import ApproximateIndex, BlockIndex
from kvrouter.kernel.placement.cache_view import PredictedCacheView
from kvrouter.kernel.routing.interface import Decision
from kvrouter.router.feed_commands import FeedCommands, let_go
from kvrouter.router.index_work import IndexWork, Steps, empty, listed
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.router.rank_ingest import Capacity, RankIngest, loop_time_s
from kvrouter.transports.events.port import AnswerTooLarge, EventSubscriber

T = TypeVar("T")

SILENT_AFTER_S = 15.0
"""A rank that was not heard for this long publishes no events: workers send heartbeats every 5 s."""

RANK_BLOCKS_MAX = 1 << 24
"""The most blocks that are believed of one rank in one medium, whatever its card says."""

WORKER_BLOCKS_FACTOR = 4
"""All ranks of one worker together are believed as many times the blocks of one rank in one medium."""

SNAPSHOTS_ASKED_MAX = 32
"""Workers that are asked for their whole state at once; the next is asked when the index has an answer."""


class FeedReading(NamedTuple):
    """A feed's state, for how long its blocks have not been known for sure, and the age of its last batch.

    ``silent_s``: since the last batch or heartbeat, else since the rank joined. Answers to questions do not
    count: a rank that only answers them is silent. ``clock_ahead_s``: how far its sender's wall clock is
    ahead of this one's, below 0 for one that is behind; None before its first message.
    """

    state: FeedState
    stale_s: float
    lag_s: float
    silent_s: float
    is_missing: bool
    clock_ahead_s: float | None


class EventIngest:
    """Feeds one model's index. Runs on the event loop; nothing here waits for a request, and a request waits
    for one step of it at most, however much a rank holds.

    ``scores`` says per slot whether its blocks count now: a rank whose feed recovers scores nothing. One
    that reports more blocks than its worker says it has, with some slack, or than ``rank_blocks_max``, is
    emptied.
    """

    def __init__(
        self,
        index: BlockIndex,
        subscriber: EventSubscriber,
        observed: ModelInstrumentation,
        *,
        rank_blocks_max: int = RANK_BLOCKS_MAX,
    ) -> None:
        self._index = index
        self._rank_blocks_max = rank_blocks_max
        self._subscriber = subscriber
        self._observed = observed
        self._commands = FeedCommands(index, observed, self._ask)
        self._work = IndexWork(self._caught_up, self._fell_behind)
        self._snapshots = asyncio.Semaphore(SNAPSHOTS_ASKED_MAX)
        self._rank_ingests: dict[WorkerRank, RankIngest] = {}
        self._by_slot: dict[Slot, RankIngest] = {}
        self._scores: npt.NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._silent = 0
        self._silence_timer: asyncio.TimerHandle | None = None
        self._awake = AwakeClock(SILENT_AFTER_S / 3.0)
        self._silence_checked_s = 0.0

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
        return ((ingest.slot, ingest.feed) for ingest in self._rank_ingests.values())

    def feed_at(self, slot: Slot) -> RankFeed | None:
        """The feed whose blocks are at the slot now."""
        ingest = self._by_slot.get(slot)
        return None if ingest is None else ingest.feed

    def feed_readings(self) -> Iterator[tuple[Slot, FeedReading]]:
        """The reading of each slot's feed."""
        now_s = loop_time_s()
        for ingest in self._rank_ingests.values():
            since_s = now_s if ingest.stale_since_s is None else ingest.stale_since_s
            yield (
                ingest.slot,
                FeedReading(
                    ingest.state,
                    stale_s=now_s - since_s,
                    lag_s=ingest.lag_s,
                    silent_s=now_s - ingest.heard_s,
                    is_missing=ingest.is_missing,
                    clock_ahead_s=ingest.clock.ahead_s,
                ),
            )

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """A worker rank was discovered: ask it for what it holds."""
        self._grow(slot + 1)
        now_s = loop_time_s()
        ingest = self._rank_ingests[rank] = self._by_slot[slot] = RankIngest(
            RankFeed(rank), slot, now_s, capacity=Capacity.of(None, blocks_max=self._rank_blocks_max)
        )
        self._silent += 1
        self._watch_silence()
        self._run(ingest, self._commands.begin(ingest, epoch))

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int = 1) -> None:
        """So many blocks the rank at the slot can hold on its GPU; None where its worker does not say.

        The ``n_ranks`` of its worker have equal shares of what is believed of all of them together.
        """
        ingest = self._by_slot.get(slot)
        if ingest is not None:
            share = WORKER_BLOCKS_FACTOR * self._rank_blocks_max // n_ranks
            ingest.capacity = Capacity.of(total_blocks, blocks_max=min(self._rank_blocks_max, share))

    def freed(self, slot: Slot) -> None:
        """A slot has no worker rank any more: its blocks go, and so does what runs for it."""
        ingest = self._by_slot.pop(slot, None)
        if ingest is not None:
            self._stop(ingest)
            if self._rank_ingests.get(ingest.feed.rank) is ingest:  # else the rank is at another slot by now
                del self._rank_ingests[ingest.feed.rank]
            if not ingest.is_scoring:
                self._silent -= 1
            self._scores[slot] = False
        self._work.run(slot, empty(self._index, slot, let_go))

    def on_batch(self, batch: KvBatch) -> None:
        """A batch arrived; of a rank that is not known yet it is dropped: a snapshot will have it."""
        ingest = self._rank_ingests.get(batch.rank)
        if ingest is None:
            return
        ingest.heard_s = loop_time_s()
        if batch.published_s:
            ahead_s = batch.published_s - time.time()
            ingest.lag_s = max(0.0, -ahead_s)
            ingest.clock.note(ahead_s, now_s=ingest.heard_s)
        ingest.is_missing = False
        if ingest.idle.is_set():
            self._after(ingest, self._commands.taken(ingest, batch))
        elif not ingest.waiting.add(batch):
            self._observed.feed_counted(FeedCount.INBOX_FULL, 1)

    def doubt(self, slot: Slot) -> None:
        """The engine's own answers contradict what is known of the rank: ask its worker for all of it.

        While the index is at work for the rank nothing is done: if the contradiction goes on, this is called
        again.
        """
        ingest = self._by_slot.get(slot)
        if ingest is not None and ingest.idle.is_set():
            self._after(ingest, ingest.feed.on_doubt(now_s=loop_time_s()))

    async def snapshot(self, slot: Slot) -> KvSnapshot | None:
        """What the rank at the slot holds now, read step by step; what it publishes meanwhile waits.

        None where that is not known for sure, or the rank goes away.
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
        """Stop everything that runs."""
        for ingest in self._rank_ingests.values():
            self._stop(ingest)
        self._rank_ingests.clear()
        self._by_slot.clear()
        self._work.close()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def _after(self, ingest: RankIngest, commands: list[Command]) -> None:
        """Do what a feed said, until it says nothing more; then set its next timer."""
        self._run(ingest, self._commands.carry_out(ingest, commands))

    def _run(self, ingest: RankIngest, steps: Steps) -> None:
        """Do the first step now; if that is not all, the rank scores nothing until the last."""
        if self._work.run(ingest.slot, steps):
            self._settle(ingest)
            return
        ingest.idle.clear()
        ingest.is_behind = True
        if ingest.is_scoring:
            self._score(ingest, False)

    def _caught_up(self, slot: Slot) -> None:
        """The index is where the slot's feed is, and what came meanwhile has its turn."""
        ingest = self._by_slot.get(slot)
        if ingest is None:
            return
        ingest.is_behind = False
        ingest.idle.set()
        self._after(ingest, [])

    def _fell_behind(self, slot: Slot) -> None:
        """A mistake of ours: nobody can know what of it is in the index, so its worker is asked for all."""
        ingest = self._by_slot.get(slot)
        if ingest is not None:
            ingest.is_behind = False
            ingest.idle.set()
            self._after(ingest, ingest.feed.on_orphan(now_s=loop_time_s()))

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
            ingest.stale_since_s = loop_time_s()
        if state is not ingest.reported:
            ingest.reported = state
            self._observed.feed_changed(ingest.feed.rank, state)
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
        if ingest.idle.is_set():  # else it is set again once the index has done its work
            self._after(ingest, ingest.feed.on_timeout(now_s=loop_time_s()))

    def _ask(self, ingest: RankIngest, command: AskRange | AskSnapshot) -> None:
        """Ask the worker; an older question that is still open has been given up by the feed."""
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
            self._after(ingest, feed.on_range(ticket, batch, now_s=loop_time_s()))
            return
        async with self._snapshots:
            whole = subscriber.recover_snapshot(feed.rank, blocks_max=ingest.capacity.total)
            try:
                snapshot = await self._asked(ingest, ticket, whole)
            except AnswerTooLarge as error:
                await _is_ready(ingest)
                self._observed.kv_events_over_limit(feed.rank, error.message)
                self._after(ingest, feed.on_overfilled(now_s=loop_time_s()))
                return
            await _is_ready(ingest)
            self._after(ingest, feed.on_snapshot(ticket, snapshot, now_s=loop_time_s()))
            await ingest.idle.wait()  # the next whole state is asked for when this one has its place

    async def _asked(
        self, ingest: RankIngest, ticket: int, question: Coroutine[None, None, T | None]
    ) -> T | None:
        """The answer to ``question``, which goes out now; one that cannot be read is none.

        Raises AnswerTooLarge.
        """
        ingest.feed.on_asked(ticket, now_s=loop_time_s())
        self._set_timer(ingest)
        try:
            return await question
        except AnswerTooLarge:
            raise
        except (KvrouterError, OSError, ValueError) as error:
            self._observed.recovery_failed(ingest.feed.rank, str(error))
            return None

    def _answered(self, task: asyncio.Task[None]) -> None:
        """A mistake of ours in the task must not vanish; the feed's timer asks again."""
        if not task.cancelled() and task.exception() is not None:
            self._observed.mistake_in_recovery(task.exception())

    def _watch_silence(self) -> None:
        if self._silence_timer is None and self._rank_ingests:
            loop = asyncio.get_running_loop()
            self._silence_timer = loop.call_later(self._awake.every_s, self._check_silence)
            self._silence_checked_s = loop_time_s()

    def _check_silence(self) -> None:
        self._silence_timer = None
        now_s = loop_time_s()
        elapsed_s, self._silence_checked_s = now_s - self._silence_checked_s, now_s
        stood_still = self._awake.advance(elapsed_s)  # then what the workers said is read only after this
        for rank, ingest in self._rank_ingests.items():
            silent_s = now_s - ingest.heard_s
            if silent_s > SILENT_AFTER_S and not ingest.is_missing and not stood_still:
                ingest.is_missing = True
                self._observed.kv_events_missing(rank, silent_s)
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
    """Return once the feed may be handed the answer that the current task has."""
    while not ingest.idle.is_set():
        await ingest.idle.wait()
    if ingest.ask is asyncio.current_task():
        ingest.ask = None


def _to_the_end(steps: Steps, ended: asyncio.Event) -> Steps:
    """Take the steps; ``ended`` is set when none of them failed or was given up."""
    yield from steps
    ended.set()


U32 = npt.NDArray[np.uint32]


class EventCacheView:
    """KV events report what each rank holds. A rank whose feed recovers scores nothing.

    What comes after an image is reported in tokens that only its engine knows: who holds that is
    ``predicted``.
    """

    def __init__(self, index: BlockIndex, pump: EventIngest, predicted: ApproximateIndex) -> None:
        self.index = index
        self.pump = pump
        self._predicted = PredictedCacheView(predicted)
        self._out: U32 = np.zeros(16, np.uint32)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, has_media: bool = False) -> U32 | None:
        """Leading blocks held, by slot."""
        if len(self._out) < n_slots:
            self._out = np.zeros(max(n_slots, 2 * len(self._out)), np.uint32)
        out = self._out[:n_slots]
        self.index.overlap(prompt, out)
        if not self.pump.all_score:
            out *= self.pump.scores(n_slots)
        if has_media:
            np.maximum(out, self._predicted.overlap(prompt, n_slots, now_s=now_s), out=out)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, has_media: bool = False) -> None:
        """The engines' own events will report it, but for images."""
        if has_media:
            self._predicted.decided(decision, prompt, now_s=now_s)

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Its feed begins."""
        self.pump.joined(rank, slot, epoch)

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Of more than that nothing is believed."""
        self.pump.set_total_blocks(slot, total_blocks, n_ranks=n_ranks)

    def freed(self, slot: Slot) -> None:
        """The pump drops the slot's blocks with its feed."""
        self.pump.freed(slot)
        self._predicted.freed(slot)

    def is_sure_of(self, slot: Slot) -> bool:
        """Every event of its rank was applied, as far as anybody can know."""
        feed = self.pump.feed_at(slot)
        return feed is not None and feed.state is FeedState.LIVE

    def doubt(self, slot: Slot) -> None:
        """The pump asks the worker for all that it holds."""
        self.pump.doubt(slot)

    def on_batch(self, batch: KvBatch) -> None:
        """On to the rank's feed."""
        self.pump.on_batch(batch)

    def close(self) -> None:
        """Stop the feeds."""
        self.pump.close()
