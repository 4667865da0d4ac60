"""Caches as they would have been in a recorded past: of one fleet-wide cache, or of each worker rank.

Each is the mock engines' KV memory, so blocks are evicted leaf first, least recent first, and what runs holds
its blocks until it ends.
"""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.engines.mock_engine.ranks import PagedKv
from kvrouter.kernel.index import ContentIndex
from kvrouter.sim.traces.recorded_trace import PastRequest

ENDLESS_BLOCKS = (1 << 32) - 3
"""The largest cache that is modelled; one of unknown size is taken to be as large."""

RANKS_ASKED = 64
"""Up to this many caches are asked one by one; more have an index, in which each change costs more."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)

U32 = npt.NDArray[np.uint32]


class PastPrompt(NamedTuple):
    """A request's prompt and the KV that it and its answer need, in blocks.

    ``hashes`` are those of the prompt's full blocks and then of the answer's, which are unique.
    """

    prompt: Prompt
    hashes: bytes
    n_prompt: int
    """The prompt's full blocks."""
    n_full: int
    """Full blocks, the answer's included."""
    n_total: int
    """Blocks, a partial one included."""

    @property
    def n_findable(self) -> int:
        """The blocks that a cache can hold: the last token of a prompt is always computed."""
        return min(self.n_prompt, (self.prompt.isl_tokens - 1) // self.prompt.block_size)


def past_prompt(request: PastRequest, *, has_answer: bool) -> PastPrompt:
    """Return a recorded prompt; with its answer where the same worker makes that."""
    record, block_size = request.record, request.record.block_size
    names: npt.NDArray[np.uint64] = np.frombuffer(request.pieces, dtype=np.uint64)
    n_tokens = record.input_tokens + (record.output_tokens if has_answer else 0)
    n_full = n_tokens // block_size
    first = np.uint64((request.number + 1) << 24)
    own = (np.arange(n_full - len(names), dtype=np.uint64) + first) * _SPREAD
    column = names.astype("<u8", copy=False).tobytes()
    return PastPrompt(
        prompt=Prompt.from_blocks(column, isl_tokens=record.input_tokens, block_size=block_size),
        hashes=column + own.astype("<u8", copy=False).tobytes(),
        n_prompt=len(names),
        n_full=n_full,
        n_total=-(-n_tokens // block_size),
    )


class SharedCache:
    """One cache of the size of a whole fleet, which grows and shrinks with it; at first it has no room."""

    def __init__(self) -> None:
        self._kv = PagedKv(total_blocks=ENDLESS_BLOCKS, opaque=False, seed=0)
        self._taken = self._kv.hold(b"", 0, ENDLESS_BLOCKS)
        self._n_blocks = 0
        self._ends: list[tuple[float, int]] = []

    def resize(self, n_blocks: int) -> None:
        """Change the size to ``n_blocks``: idle blocks are evicted for that, held ones stay."""
        n_blocks = min(n_blocks, ENDLESS_BLOCKS)
        if n_blocks == self._n_blocks:
            return
        self._n_blocks = n_blocks
        if self._taken is not None:
            self._kv.release(self._taken)
        n_away = min(ENDLESS_BLOCKS - n_blocks, self._kv.free_blocks + self._kv.idle_blocks)
        self._taken = self._kv.hold(b"", 0, n_away)

    def matched(self, prompt: PastPrompt) -> int:
        """Count the blocks of a prompt that are there."""
        return self._kv.matched(prompt.hashes, prompt.n_findable)

    def hold(self, prompt: PastPrompt, *, until_s: float) -> None:
        """Hold a request's blocks, as many as fit."""
        heapq.heappush(self._ends, (until_s, _hold(self._kv, prompt)))
        self._kv.take_events()  # or they would be kept

    def release_until(self, now_s: float) -> None:
        """Release what ended by now."""
        while self._ends and self._ends[0][0] <= now_s:
            self._kv.release(heapq.heappop(self._ends)[1])


class RankCaches:
    """The caches of all ranks of a fleet, by slot; ``is_indexed``: with an index over them."""

    def __init__(self, *, is_indexed: bool) -> None:
        self._kv: dict[Slot, PagedKv] = {}
        self._index = ContentIndex() if is_indexed else None
        self._out: U32 = np.zeros(16, np.uint32)
        self._ends: list[tuple[float, int, Slot, PagedKv, int, int]] = []
        self._n_held = 0
        self._sizes: npt.NDArray[np.float64] = np.ones(16)
        self._filled: npt.NDArray[np.float64] = np.zeros(16)
        self.running: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        """Requests that hold blocks, by slot."""
        self.held: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        """Blocks that they were to hold, by slot."""

    def join(self, slot: Slot, n_blocks: int | None) -> None:
        """Add a rank with an empty cache of this size at the slot; None: unlimited."""
        while slot >= len(self.running):
            self.running = np.concatenate((self.running, np.zeros_like(self.running)))
            self.held = np.concatenate((self.held, np.zeros_like(self.held)))
            self._sizes = np.concatenate((self._sizes, np.ones_like(self._sizes)))
            self._filled = np.concatenate((self._filled, np.zeros_like(self._filled)))
        size = ENDLESS_BLOCKS if n_blocks is None else min(n_blocks, ENDLESS_BLOCKS)
        self._kv[slot] = PagedKv(total_blocks=size, opaque=False, seed=0)
        self._sizes[slot] = max(1, size)
        self._filled[slot] = 0.0

    def leave(self, slot: Slot) -> int:
        """Remove the rank at the slot with its cache; return how many blocks were cached there."""
        kv = self._kv.pop(slot, None)
        if self._index is not None:
            self._index.drop_rank(slot)
        if kv is None:
            return 0
        self.running[slot] = self.held[slot] = 0
        return kv.cached_blocks

    def overlap(self, prompt: PastPrompt, n_slots: int) -> U32:
        """Return how many leading blocks of the prompt each slot has; the column is used again."""
        if len(self._out) < n_slots:
            self._out = np.zeros(2 * n_slots, np.uint32)
        out = self._out[:n_slots]
        if self._index is not None:
            self._index.overlap(prompt.prompt, out)
            return np.minimum(out, np.uint32(prompt.n_findable), out=out)
        out[:] = 0
        for slot, kv in self._kv.items():
            out[slot] = kv.matched(prompt.hashes, prompt.n_findable)
        return out

    def emptiest(self, slots: npt.NDArray[np.int64]) -> Slot:
        """Return the slot into which least was put so far, for its size."""
        return Slot(int(slots[np.argmin(self._filled[slots] / self._sizes[slots])]))

    def hold(self, slot: Slot, prompt: PastPrompt, *, until_s: float) -> None:
        """Hold a request's blocks in the rank at the slot; does nothing at an empty slot."""
        kv = self._kv.get(slot)
        if kv is None:
            return
        n_new = prompt.n_full - kv.matched(prompt.hashes, prompt.n_full)
        table = _hold(kv, prompt)
        events = kv.take_events()
        if self._index is not None:
            self._index.apply(slot, events)
        self._filled[slot] += n_new
        self.running[slot] += 1
        self.held[slot] += prompt.n_total
        self._n_held += 1
        heapq.heappush(self._ends, (until_s, self._n_held, slot, kv, table, prompt.n_total))

    def release_until(self, now_s: float) -> None:
        """Release what ended by now."""
        while self._ends and self._ends[0][0] <= now_s:
            _, _, slot, kv, table, n_total = heapq.heappop(self._ends)
            kv.release(table)
            if self._kv.get(slot) is kv:
                self.running[slot] -= 1
                self.held[slot] -= n_total


def _hold(kv: PagedKv, prompt: PastPrompt) -> int:
    """Hold the cached blocks of a request, and then as many of its other blocks as fit."""
    n_matched = kv.matched(prompt.hashes, prompt.n_full)
    table = kv.hold(prompt.hashes, n_matched, 0)
    if table is None:
        raise RuntimeError("blocks that are cached can always be held")
    n_new = min(prompt.n_total - n_matched, kv.free_blocks + kv.idle_blocks)
    if n_new > 0:
        kv.grow(table, n_new)
        kv.commit(table, prompt.hashes, min(prompt.n_full, n_matched + n_new))
    return table
