"""Long operations on the index in steps: between two steps the event loop serves requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvrouter.core.events import HASH_BYTES, Cleared, Held, KvEvent, Removed, Stored, unpack_hashes
from kvrouter.core.ids import EngineHash, Slot
from kvrouter.kernel.index import Applied, BlockIndex

STEP_BLOCKS = 2048
"""Blocks that one step places, forgets or lists, about: a millisecond or two."""

STEP_EVENTS = 128
"""Events that one step applies: what an engine computes in one step of its own is an event of few blocks."""

Steps = Iterator[None]
"""Work that may be left for other things wherever it yields. It does not yield at its end."""

Note = Callable[[Applied], None]


class IndexWork:
    """Does the work for many slots in turn: one step, for one slot, in a turn of the event loop.

    However many ranks have to be learned or forgotten at once, the event loop comes round after each step.
    """

    def __init__(self, on_done: Callable[[Slot], None], on_failed: Callable[[Slot], None]) -> None:
        self._on_done = on_done
        self._on_failed = on_failed
        self._jobs: dict[Slot, Steps] = {}
        self._turn: asyncio.Handle | None = None

    def run(self, slot: Slot, steps: Steps) -> bool:
        """Do the first step now. True when that was all; else ``on_done`` is called after the last, or
        ``on_failed`` after one that raised, which the loop's exception handler then shows.

        What is under way for the slot is given up.
        """
        self._jobs.pop(slot, None)
        for _ in steps:
            self._jobs[slot] = steps
            self._go_on()
            return False
        return True

    def give_up(self, slot: Slot) -> None:
        """Do no more of what is under way for the slot."""
        self._jobs.pop(slot, None)

    def close(self) -> None:
        """Give up everything."""
        self._jobs.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _go_on(self) -> None:
        if self._turn is None and self._jobs:
            self._turn = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """One step for the slot whose last step was the longest ago: none waits for another's end."""
        self._turn = None
        slot = next(iter(self._jobs), None)
        if slot is None:
            return
        steps = self._jobs.pop(slot)
        self._jobs[slot] = steps
        try:
            for _ in steps:
                self._go_on()
                return
        except Exception:
            self._over(slot)
            self._on_failed(slot)
            raise
        self._over(slot)
        self._on_done(slot)

    def _over(self, slot: Slot) -> None:
        self._jobs.pop(slot, None)
        self._go_on()


def empty(index: BlockIndex, slot: Slot, note: Note) -> Steps:
    """Forget what the slot holds."""
    n_blocks = 0
    while (applied := index.drop_some(slot)).cleared:
        note(applied)
        n_blocks += applied.cleared
        if n_blocks >= STEP_BLOCKS:
            yield
            n_blocks = 0


def place(index: BlockIndex, slot: Slot, held: Sequence[Held], note: Note) -> Steps:
    """Add what a snapshot lists. Raises ValueError for a malformed one, after what came before it."""
    n_blocks = 0
    for part in _parts(held):
        if n_blocks + part.n_blocks > STEP_BLOCKS:
            yield
            n_blocks = 0
        note(index.apply(slot, (part,)))
        n_blocks += part.n_blocks


def is_short(events: Sequence[KvEvent]) -> bool:
    """Whether one step is enough to apply the events."""
    if len(events) > STEP_EVENTS or Cleared in map(type, events):
        return False
    return sum(event.n_blocks for event in events) <= STEP_BLOCKS


def apply(index: BlockIndex, slot: Slot, events: Sequence[KvEvent], note: Note) -> Steps:
    """Apply the events of one rank, in order. Raises ValueError where they are malformed: what came before is
    applied, in part.
    """
    step: list[KvEvent] = []
    n_blocks = 0
    for event in events:
        if isinstance(event, Cleared):
            note(index.apply(slot, step))
            yield from empty(index, slot, note)
            step, n_blocks = [], 0
            continue
        for part in _parts_of(event):
            if len(step) >= STEP_EVENTS or n_blocks + part.n_blocks > STEP_BLOCKS:
                note(index.apply(slot, step))
                yield
                step, n_blocks = [], 0
            step.append(part)
            n_blocks += part.n_blocks
    note(index.apply(slot, step))


def listed(index: BlockIndex, slot: Slot, held: list[Held]) -> Steps:
    """Add what the slot holds to ``held``. Right as long as nothing is applied to the slot meanwhile."""
    place = n_blocks = 0
    while (some := index.dump_some(slot, place)) is not None:
        events, place = some
        if n_blocks >= STEP_BLOCKS:
            yield
            n_blocks = 0
        held += events
        n_blocks += sum(event.n_blocks for event in events)


def _parts(held: Sequence[Held]) -> Iterator[Held]:
    for event in held:
        for part in _slices(event):
            yield Held(event.engine_hashes[part], event.sequence_hashes[part], event.medium)


def _parts_of(event: Stored | Removed) -> Iterator[Stored | Removed]:
    """Yield the event as several that follow each other, of a step's blocks each."""
    if event.n_blocks <= STEP_BLOCKS:
        yield event
        return
    if isinstance(event, Removed):
        for part in _slices(event):
            yield Removed(event.engine_hashes[part], event.medium)
        return
    parent = event.parent
    for part in _slices(event):
        stored = Stored(parent, event.engine_hashes[part], event.block_hashes[part], event.medium)
        yield stored
        parent = EngineHash(unpack_hashes(stored.engine_hashes[-HASH_BYTES:])[0])


def _slices(event: Held | Stored | Removed) -> Iterator[slice]:
    step_bytes = STEP_BLOCKS * HASH_BYTES
    return (slice(begin, begin + step_bytes) for begin in range(0, len(event.engine_hashes), step_bytes))
