"""Carries out feeds' commands in the index of their model."""

from collections.abc import Callable, Generator, Sequence
from functools import partial

from kvrouter.core.events import KvBatch, KvEvent, Medium
from kvrouter.core.ids import Epoch
from kvrouter.kernel.feed.states import Apply, AskRange, AskSnapshot, Command, Count, Empty, FeedState, Load
from kvrouter.kernel.index import Applied, BlockIndex
from kvrouter.router.index_work import STEP_BLOCKS, STEP_EVENTS, Steps, apply, empty, is_short, place
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.router.rank_ingest import RankIngest


class FeedCommands:
    """Carries out a feed's commands step by step; ``ask`` sends a recovery request to its worker."""

    def __init__(
        self,
        index: BlockIndex,
        instrumentation: ModelInstrumentation,
        ask: Callable[[RankIngest, AskRange | AskSnapshot], None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._instrumentation = instrumentation
        self._ask = ask
        self._clock = clock

    def begin(self, ingest: RankIngest, epoch: Epoch) -> Steps:
        """Empty the slot; begin its new epoch."""
        yield from empty(self._index, ingest.slot, uncounted)
        yield from self.carry_out(ingest, ingest.feed.on_new_epoch(epoch, now_s=self._clock()))

    def carry_out(self, ingest: RankIngest, commands: list[Command]) -> Steps:
        """Carry out the feed's commands, then pass it the batches that wait."""
        slot = ingest.slot
        n_events = 0
        while True:
            orphaned, is_overfilled = 0, False
            for command in commands:
                match command:
                    case Apply(events):
                        if is_short(events):
                            orphaned += self._apply(ingest, events)
                        else:
                            orphaned += yield from self._apply_in_steps(ingest, events)
                    case Empty():
                        yield from empty(self._index, slot, uncounted)
                        ingest.unchecked_blocks = 0
                    case Load(snapshot):
                        yield from empty(self._index, slot, self._instrumentation.events_applied)
                        ingest.unchecked_blocks = 0
                        steps = place(self._index, slot, snapshot.events, partial(self._note, ingest))
                        yield from self._until_full(ingest, steps)
                    case AskRange() | AskSnapshot():
                        self._ask(ingest, command)
                    case Count(name, n):
                        self._instrumentation.feed_counted(name, n)
                if self._is_overfilled(ingest):
                    is_overfilled = True
                    break
            if is_overfilled:
                self._instrumentation.kv_events_over_limit(ingest.feed.rank, f"{self._held(ingest)} blocks")
                ingest.unchecked_blocks = 0
                commands = ingest.feed.on_overfilled(now_s=self._clock())
                continue
            if orphaned:
                commands = ingest.feed.on_orphan(now_s=self._clock())
                continue
            if not ingest.waiting:
                return
            if n_events >= STEP_EVENTS:
                yield
                n_events = 0
            batch = ingest.waiting.take()
            n_events += 1 + batch.weight
            commands = self.taken(ingest, batch)

    def taken(self, ingest: RankIngest, batch: KvBatch) -> list[Command]:
        """Pass a batch to the feed; a heartbeat whose block count is not the index's is a contradiction."""
        feed, now_s = ingest.feed, self._clock()
        commands = feed.on_batch(batch, now_s=now_s)
        is_here = feed.state is FeedState.LIVE and feed.next_event_id == batch.next_event_id
        if commands or not is_here or batch.held_blocks is None or self._held(ingest) == batch.held_blocks:
            return commands
        return feed.on_contradiction(now_s=now_s)

    def _held(self, ingest: RankIngest) -> int:
        return sum(self._index.held(ingest.slot, medium) for medium in Medium)

    def _apply(self, ingest: RankIngest, events: Sequence[KvEvent]) -> int:
        """Apply events that fit into one step; return how many blocks have no parent."""
        try:
            applied = self._index.apply(ingest.slot, events)
        except ValueError as error:  # no event was applied: as uncertain as after a lost parent
            self._instrumentation.malformed_events(ingest.feed.rank, str(error))
            return 1
        self._note(ingest, applied)
        return applied.orphaned

    def _note(self, ingest: RankIngest, applied: Applied) -> None:
        ingest.unchecked_blocks += applied.stored
        self._instrumentation.events_applied(applied)

    def _until_full(self, ingest: RankIngest, steps: Steps) -> Steps:
        """Take the steps; stop once the rank has more blocks than it can hold."""
        for _ in steps:
            if self._is_overfilled(ingest):
                return
            yield

    def _is_overfilled(self, ingest: RankIngest) -> bool:
        """Whether the index has more blocks of the rank than its worker can hold. The comparison runs once
        per ``STEP_BLOCKS // 2`` stored blocks, so that its cost is negligible.
        """
        capacity = ingest.capacity
        if ingest.unchecked_blocks < STEP_BLOCKS // 2:
            return False
        held = {medium: self._index.held(ingest.slot, medium) for medium in Medium}
        if any(n_blocks > capacity.holds(medium) for medium, n_blocks in held.items()):
            return True
        ingest.unchecked_blocks = 0
        return False

    def _apply_in_steps(self, ingest: RankIngest, events: Sequence[KvEvent]) -> Generator[None, None, int]:
        orphaned = 0

        def note(applied: Applied) -> None:
            nonlocal orphaned
            orphaned += applied.orphaned
            self._note(ingest, applied)

        try:
            yield from self._until_full(ingest, apply(self._index, ingest.slot, events, note))
        except ValueError as error:
            self._instrumentation.malformed_events(ingest.feed.rank, str(error))
            return 1
        return orphaned


def uncounted(_applied: Applied) -> None:
    """Count nothing: blocks dropped with a rank that left or restarted are not cleared events."""
