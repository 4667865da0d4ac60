"""The approximate index in one plain dict: what the native one has to equal. Tests alone use it."""

from dataclasses import dataclass, field

from kvrouter.core.columns import unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import SequenceHash, Slot
from kvrouter.index.port import OverlapColumn


@dataclass(frozen=True)
class NaiveApproximateStats:
    """Sizes; a plain dict's memory is not counted."""

    blocks: int
    bytes: int = 0


@dataclass(frozen=True)
class _Touched:
    at_s: float
    number: int
    depth: int


@dataclass
class NaiveApproximateIndex:
    """Who may hold which blocks; see :class:`kvrouter.index.port.ApproximateIndex`."""

    ttl_s: float = 120.0
    max_blocks: int = 1 << 20
    prune_target_ratio: float = 0.8
    _blocks: dict[tuple[Slot, SequenceHash], _Touched] = field(default_factory=dict)
    _n_touches: int = 0

    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """A decision sends the prompt to the slot."""
        self.expire(now_s)
        self._n_touches += 1
        for depth, sequence in enumerate(unpack_hashes(prompt.sequence_hashes)):
            self._blocks[slot, SequenceHash(sequence)] = _Touched(now_s, self._n_touches, depth)
        if len(self._blocks) > self.max_blocks:
            self._prune()

    def _prune(self) -> None:
        n_over = len(self._blocks) - int(self.max_blocks * self.prune_target_ratio)
        oldest = sorted(self._blocks.items(), key=lambda item: (item[1].at_s, -item[1].depth, item[1].number))
        for block, _ in oldest[:n_over]:
            del self._blocks[block]

    def overlap(self, prompt: Prompt, out: OverlapColumn, now_s: float) -> None:
        """Fill ``out`` with the leading blocks that each slot may hold."""
        slots = {slot for slot, _ in self._blocks}
        out[:] = 0
        for slot in slots:
            for sequence in unpack_hashes(prompt.sequence_hashes):
                touched = self._blocks.get((slot, SequenceHash(sequence)))
                if touched is None or touched.at_s + self.ttl_s <= now_s:
                    break
                out[slot] += 1

    def expire(self, now_s: float) -> int:
        """Forget the blocks whose time is over; return how many."""
        return self._forget({b for b, touched in self._blocks.items() if touched.at_s + self.ttl_s <= now_s})

    def drop(self, slot: Slot) -> int:
        """Forget the slot; return how many blocks it was thought to hold."""
        return self._forget({block for block in self._blocks if block[0] == slot})

    def _forget(self, blocks: set[tuple[Slot, SequenceHash]]) -> int:
        for block in blocks:
            del self._blocks[block]
        return len(blocks)

    def stats(self) -> NaiveApproximateStats:
        """Sizes now."""
        return NaiveApproximateStats(len(self._blocks))
