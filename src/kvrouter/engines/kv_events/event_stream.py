"""One engine's event stream, sans-I/O: order, gaps, replay, restart.

::

      start ──▶ WAITING ── replay ended, or cannot be had ──▶ FOLLOWING
                   ▲                                              │
                   └──────── gap, restart, reconnected ───────────┘

An engine numbers its batches from 0 at every start and keeps the last of them for replay. During a
replay live batches wait. A gap that no replay fills may hide removals: every rank of the socket is
emptied, and is *partial* from there on. A rank is partial as well when its worker attaches after the engine
dropped its first batches: blocks with known parents count, and others do not.

A replay after a gap begins with the last batch taken, which has to come back unchanged: if it does not, the
engine restarted in between, whatever its numbers.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.batches import Published, ReplayEnd, read_published, read_replayed
from kvrouter.engines.kv_events.engine_events import Decode, EngineTraits, Skipped
from kvrouter.engines.kv_events.rank_blocks import RankBlocks


@dataclass(frozen=True, slots=True)
class EventStreamLimits:
    """The limits of one socket.

    ``waiting_batches_max``: live batches kept during a replay; further ones are dropped, and the gap is asked
    for afterwards. ``remembered_batches_max``: how many past batches are recognised when they come again.
    ``ranks_max``: how many ranks it may report; events of further ranks are refused.
    """

    waiting_batches_max: int = 8192
    remembered_batches_max: int = 16_384
    ranks_max: int = 1024


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish these events of one rank, in order."""

    dp_rank: DpRank
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the engine for its batches from ``start_seq`` on; pass in each answer, or that there is none."""

    start_seq: int


@dataclass(frozen=True, slots=True)
class Missed:
    """Batches ``first_seq`` to ``last_seq`` (inclusive) are lost for good; every rank begins empty again.

    ``last_seq`` is None if it is unknown whether there were any.
    """

    first_seq: int
    last_seq: int | None


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine restarted; its ranks were emptied."""


@dataclass(frozen=True, slots=True)
class MalformedBatch:
    """The engine sent a message that its encoding does not allow."""

    error: ProtocolError


Command = Publish | AskReplay | Missed | Restarted | MalformedBatch


class EngineEventStream:
    """Turns the frames of one engine socket into what its ranks publish.

    The driver carries the commands out in order before its next call. With ``can_replay`` it connects its
    subscription, then calls :meth:`start`.
    """

    def __init__(
        self,
        decode: Decode,
        traits: EngineTraits,
        *,
        can_replay: bool,
        limits: EventStreamLimits | None = None,
    ) -> None:
        self.rank_blocks: dict[DpRank, RankBlocks] = {}
        self._decode = decode
        self._traits = traits
        self._can_replay = can_replay
        self._limits = limits or EventStreamLimits()
        self._next_seq: int | None = None
        self._remembered: dict[int, int] = {}
        self._is_partial = False
        self._waiting: deque[Published] | None = None
        self._n_waited_before = 0
        self._is_void = False
        self._has_shown_any = False
        self._fruitless_at: int | None = None
        self._skipped: Counter[Skipped] = Counter()
        self._out: list[Command] = []

    @property
    def partial_ranks(self) -> tuple[DpRank, ...]:
        """The ranks of which events were missed since their last clear."""
        return tuple(rank for rank, blocks in self.rank_blocks.items() if blocks.is_partial)

    @property
    def lookahead_tokens(self) -> int:
        """How many tokens behind a block its name covers, the most of any rank."""
        return max((blocks.lookahead_tokens for blocks in self.rank_blocks.values()), default=0)

    @property
    def is_waiting(self) -> bool:
        """Whether a replay is awaited."""
        return self._waiting is not None

    def skipped(self, dp_rank: DpRank) -> Counter[Skipped]:
        """Return the counts of skipped events of a rank since its engine began. Those without a rank count
        with the socket's own rank, since the beginning.
        """
        blocks = self.rank_blocks.get(dp_rank)
        counts = Counter[Skipped]() if blocks is None else blocks.skipped.copy()
        if dp_rank == self._traits.dp_rank:
            counts.update(self._skipped)
        return counts

    def start(self) -> list[Command]:
        """Begin: ask for everything that the engine still has."""
        if self._can_replay:
            self._ask(0)
        return self._commands()

    def on_published(self, frames: Sequence[bytes]) -> list[Command]:
        """A message came on the subscription."""
        try:
            published = read_published(frames)
        except ProtocolError as error:
            return [self._refused(error)]
        return self.on_batch(published)

    def on_batch(self, published: Published) -> list[Command]:
        """Take a batch, in the engine's order."""
        if self._waiting is None:
            if not self._follow(published):
                self._wait((published,))
        elif len(self._waiting) < self._limits.waiting_batches_max:
            self._waiting.append(published)
        else:
            self._wait(())
        return self._commands()

    def on_replayed(self, frames: Sequence[bytes]) -> list[Command]:
        """A message came on the replay socket."""
        try:
            answer = read_replayed(frames)
        except ProtocolError as error:
            return [self._refused(error)]
        if self._waiting is None:
            return []  # of a replay that was given up
        if isinstance(answer, ReplayEnd):
            self._end_replay()
        elif not self._is_void:
            self._replayed(answer)
        return self._commands()

    def on_replay_failed(self) -> list[Command]:
        """The engine did not answer, or not to the end: the blocks held so far are unknown."""
        if self._waiting is not None:
            if self._next_seq:
                self._lose_place(self._next_seq)
            self._settle()
        return self._commands()

    def on_reconnected(self) -> list[Command]:
        """The subscription was cut off and is back: the engine may have gone on, or restarted."""
        if self._waiting is not None:
            self._wait(())
            self._is_void = True  # the answer may be of either start
        elif self._next_seq and self._can_replay:
            self._ask(self._next_seq - 1)
        elif self._next_seq:
            self._lose_place(self._next_seq)
        return self._commands()

    def on_deaf(self) -> list[Command]:
        """No further events come: the blocks held are unknown."""
        self._lose_place(self._next_seq or 0)
        return self._commands()

    def _commands(self) -> list[Command]:
        out, self._out = self._out, []
        return out

    def _ask(self, start_seq: int) -> None:
        self._wait(self._waiting or ())
        self._is_void = self._has_shown_any = False
        self._out.append(AskReplay(start_seq))

    def _wait(self, batches: Iterable[Published]) -> None:
        """Wait with ``batches``, which came before the question was put: a whole answer has them, unless they
        are of an earlier start.
        """
        self._waiting = deque(batches)
        self._n_waited_before = len(self._waiting)

    def _replayed(self, batch: Published) -> None:
        self._has_shown_any = True
        if self._next_seq is None or batch.seq >= self._next_seq:
            if batch.seq > (self._next_seq or 0):
                self._miss(self._next_seq or 0, batch.seq - 1)
            self._apply(batch)
        elif self._is_other(batch):
            self._restart_replay()
            self._is_void = True  # the rest is of the new start, which is asked for from its beginning

    def _end_replay(self) -> None:
        if not self._is_void and not self._has_shown_any and self._next_seq:
            self._restart_replay()  # not even the last batch taken is there any more
            self._is_void = True
        if self._is_void:
            self._ask(0)
            return
        if self._next_seq is None:
            self._next_seq = 0  # the engine has published nothing yet
        self._settle(after=self._n_waited_before)

    def _settle(self, *, after: int = 0) -> None:
        """Follow what waited, without the first ``after``; at another gap the rest waits on."""
        waiting, self._waiting = deque(islice(self._waiting or (), after, None)), None
        while waiting:
            batch = waiting.popleft()
            if not self._follow(batch):
                self._wait((batch, *waiting))
                return

    def _follow(self, batch: Published) -> bool:
        """Take a batch, or ask for the missing ones before it; return whether it was taken."""
        next_seq = self._next_seq
        if next_seq is not None and batch.seq < next_seq:
            if not self._is_other(batch):
                return True
            self._restart()
            next_seq = self._next_seq = 0
        if next_seq is None:
            if batch.seq and not self._is_partial:
                self._miss(0, batch.seq - 1)
        elif batch.seq > next_seq:
            if self._can_replay and self._fruitless_at != next_seq:
                self._fruitless_at = next_seq
                self._ask(max(0, next_seq - 1))
                return False
            self._miss(next_seq, batch.seq - 1)
        self._apply(batch)
        return True

    def _is_other(self, batch: Published) -> bool:
        """Whether a known number now has another batch, or is older than the remembered ones."""
        return self._remembered.get(batch.seq) != hash(batch.payload)

    def _apply(self, batch: Published) -> None:
        self._next_seq = batch.seq + 1
        self._fruitless_at = None
        self._remembered[batch.seq] = hash(batch.payload)
        if len(self._remembered) > self._limits.remembered_batches_max:
            del self._remembered[next(iter(self._remembered))]
        try:
            engine_batches = self._decode(batch.payload)
        except ProtocolError as error:
            self._out.append(self._refused(error))
            self._miss(batch.seq, batch.seq)
            return
        for each in engine_batches:
            dp_rank = self._traits.dp_rank if each.dp_rank is None else each.dp_rank
            blocks = self._blocks_of(dp_rank)
            if blocks is not None:
                self._publish(dp_rank, blocks.take(each.events))

    def _blocks_of(self, dp_rank: DpRank) -> RankBlocks | None:
        """Return the blocks of a rank, a new one if the limit allows it."""
        blocks = self.rank_blocks.get(dp_rank)
        if blocks is None and len(self.rank_blocks) >= self._limits.ranks_max:
            why = f"data_parallel_rank: {dp_rank} is one more than the {len(self.rank_blocks)} ranks allowed"
            self._out.append(self._refused(ProtocolError(why, param="data_parallel_rank")))
        elif blocks is None:
            blocks = self.rank_blocks[dp_rank] = RankBlocks(self._traits, is_partial=self._is_partial)
        return blocks

    def _lose_place(self, next_seq: int) -> None:
        """Forget the position in the stream: begin with the next batch."""
        self._miss(next_seq, None)
        self._remembered.clear()
        self._next_seq = self._fruitless_at = None

    def _miss(self, first_seq: int, last_seq: int | None) -> None:
        self._is_partial = True
        self._skipped[Skipped.MISSED] += 1
        self._out.append(Missed(first_seq, last_seq))
        for dp_rank, blocks in self.rank_blocks.items():
            self._publish(dp_rank, blocks.lose())

    def _refused(self, error: ProtocolError) -> MalformedBatch:
        self._skipped[Skipped.UNREADABLE] += 1
        return MalformedBatch(error)

    def _restart_replay(self) -> None:
        """Restart; what waits may be of either start, and comes again with the replay if of this one."""
        self._restart()
        self._wait(())

    def _restart(self) -> None:
        self._out.append(Restarted())
        for dp_rank, blocks in self.rank_blocks.items():
            self._publish(dp_rank, blocks.lose())
        self.rank_blocks.clear()
        self._remembered.clear()
        self._next_seq = self._fruitless_at = None
        self._is_partial = False

    def _publish(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        if events:
            self._out.append(Publish(dp_rank, events))
