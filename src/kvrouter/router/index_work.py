"""Index work in steps: long operations on the index, with turns of the event loop between two steps."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvrouter.core.events import (
    HASH_BYTES,
    Cleared,
    Held,
    KvEvent,
    KvEvents,
    Removed,
    Stored,
    count_blocks,
    has_cleared,
    unpack_hashes,
)
from kvrouter.core.ids import EngineHash, Slot
from kvrouter.kernel.index import Applied, BlockIndex

STEP_BLOCKS = 2048
"""About how many blocks one step adds, removes or lists: a millisecond or two."""

STEP_EVENTS = 128
"""The most events that one step applies where each is an object, as few blocks in each then take long."""

Steps = Iterator[None]
"""Work that may be interrupted at each yield. It does not yield after its last step."""

Note = Callable[[Applied], None]


class IndexWork:
    """Runs the work of many slots in turn: one step of one slot per turn of the event loop.

    So the event loop runs after each step, however many ranks are loaded or emptied at once.
    """

    def __init__(self, on_done: Callable[[Slot], None], on_failed: Callable[[Slot], None]) -> None:
        self._on_done = on_done
        self._on_failed = on_failed
        self._jobs: dict[Slot, Steps] = {}
        self._turn: asyncio.Handle | None = None

    def run(self, slot: Slot, steps: Steps) -> bool:
        """Do the first step now. Returns True when no step is left; else ``on_done`` is called after the last
        step, or ``on_failed`` after one that raised, whose error goes to the loop's exception handler.

        Replaces the slot's running work.
        """
        self._jobs.pop(slot, None)
        for _ in steps:
            self._jobs[slot] = steps
            self._go_on()
            return False
        return True

    def give_up(self, slot: Slot) -> None:
        """Give up the slot's running work."""
        self._jobs.pop(slot, None)

    def close(self) -> None:
        """Give up all work."""
        self._jobs.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _go_on(self) -> None:
        if self._turn is None and self._jobs:
            self._turn = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """Do one step for the slot with the least recent step, so that no slot waits for another's end."""
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
    """Remove the slot's blocks."""
    n_blocks = 0
    while (applied := index.drop_some(slot)).cleared:
        note(applied)
        n_blocks += applied.cleared
        if n_blocks >= STEP_BLOCKS:
            yield
            n_blocks = 0


def place(index: BlockIndex, slot: Slot, held: Sequence[Held], note: Note) -> Steps:
    """Add a snapshot's blocks. Raises ValueError for a malformed one; the blocks before the fault stay."""
    n_blocks = 0
    for part in _parts(held):
        if n_blocks + part.n_blocks > STEP_BLOCKS:
            yield
            n_blocks = 0
        note(index.apply(slot, (part,)))
        n_blocks += part.n_blocks


def is_short(events: Sequence[KvEvent]) -> bool:
    """Whether one step is enough to apply the events."""
    return (
        len(events) <= _events_max(events) and count_blocks(events) <= STEP_BLOCKS and not has_cleared(events)
    )


def _events_max(events: Sequence[KvEvent]) -> int:
    """Return how many of the events one step may apply."""
    return STEP_BLOCKS if isinstance(events, KvEvents) else STEP_EVENTS


def apply(index: BlockIndex, slot: Slot, events: Sequence[KvEvent], note: Note) -> Steps:
    """Apply a rank's events in order. Raises ValueError for a malformed one; earlier ones may be applied."""
    events_max = _events_max(events)
    for begin in range(0, len(events), events_max):
        if begin:
            yield
        some = events[begin : begin + events_max]
        if is_short(some):
            note(index.apply(slot, some))
        else:
            yield from _apply_long(index, slot, some, note)


def _apply_long(index: BlockIndex, slot: Slot, events: Sequence[KvEvent], note: Note) -> Steps:
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
    """Append the slot's blocks to ``held``. Correct only while no event is applied to the slot."""
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
    """Yield the event as consecutive parts of at most ``STEP_BLOCKS`` blocks."""
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
