"""The block index: the blocks that each worker rank holds, from KV events or predicted from decisions.

A slot is a small dense integer that identifies one worker rank.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouter._native import ApproximateIndex as _ApproximateIndex
from kvrouter._native import BlockIndex as _BlockIndex
from kvrouter._native import ContentIndex as _ContentIndex
from kvrouter._native import PrefixSet as _PrefixSet
from kvrouter.core.events import Held, KvEvent, Medium
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot

OverlapColumn = npt.NDArray[np.uint32]
"""The leading blocks of a prompt that each slot holds; at least one entry for each slot in use."""

SLOTS_MAX = 1 << 16
"""One more than the largest slot."""


class Applied(Protocol):
    """The result of applying events: counts of blocks by outcome."""

    @property
    def stored(self) -> int:
        """Stored blocks that the rank did not hold before in that medium."""

    @property
    def repeated(self) -> int:
        """Stores of a block that the rank already holds: each needs a separate removal."""

    @property
    def replaced(self) -> int:
        """Stored blocks whose engine hash had other content before, which is replaced."""

    @property
    def removed(self) -> int:
        """Removals of a block that the rank held, even if a repeated store keeps it held."""

    @property
    def unknown_removed(self) -> int:
        """Removals of a block that the rank did not hold."""

    @property
    def orphaned(self) -> int:
        """Stored blocks whose parent the rank does not hold: ignored, and a reason to recover."""

    @property
    def cleared(self) -> int:
        """Blocks that the rank held and that a clear removed."""

    @property
    def over_limit(self) -> int:
        """Stored blocks beyond ``blocks_per_rank_max``: ignored."""


class IndexStats(Protocol):
    """Sizes of an index. Tuples are by medium, in the order of :class:`Medium`."""

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """The held blocks: one for each engine hash of each rank."""

    @property
    def sequences(self) -> tuple[int, int, int, int]:
        """The distinct sequence hashes."""

    @property
    def ranks(self) -> int:
        """The ranks that hold a block in some medium."""

    @property
    def bytes(self) -> int:
        """The memory of the index."""


class BlockIndex(Protocol):
    """The blocks that each rank holds, built from the engines' KV events."""

    def apply(self, slot: Slot, events: Sequence[KvEvent | Held]) -> Applied:
        """Apply events of one rank, or parts of its snapshot, in order; all or, if one is malformed, none."""

    def drop_some(self, slot: Slot) -> Applied:
        """Remove some of the rank's blocks, a few thousand at most; ``cleared`` counts them.

        Call it until that is 0: then the rank holds nothing. Each call is short, however many blocks the rank
        holds. If time does not matter, apply ``Cleared`` instead.
        """

    def dump(self, slot: Slot) -> list[Held]:
        """Return a snapshot of the rank. Applied to an empty rank of any index, it gives an equal rank, store
        counts included. Takes time in proportion to the rank's blocks.
        """

    def dump_some(self, slot: Slot, place: int = 0) -> tuple[list[Held], int] | None:
        """Return a part of the rank's snapshot, a few thousand blocks, and the ``place`` of the next part.

        The parts from place 0 until None have the content of :meth:`dump`, in another order, if no event was
        applied to the rank in between.
        """

    def overlap(self, prompt: Prompt, out: OverlapColumn, medium: Medium = Medium.GPU) -> None:
        """Fill ``out`` with the length, in blocks, of the longest prefix of the prompt that each slot holds.

        Raises ValueError when ``out`` is shorter than the slots in use.
        """

    def held(self, slot: Slot, medium: Medium = Medium.GPU) -> int:
        """Return the number of blocks that the rank holds."""

    def stats(self) -> IndexStats:
        """Return the current sizes."""


class ApproximateStats(Protocol):
    """Sizes of an approximate index."""

    @property
    def blocks(self) -> int:
        """The predicted blocks, one for each slot that is predicted to hold it."""

    @property
    def bytes(self) -> int:
        """Its memory, in bytes."""


class ApproximateIndex(Protocol):
    """The blocks that each rank is predicted to hold, from routing decisions alone.

    A block is predicted to stay for ``ttl_s`` after the last decision for it. Above ``max_blocks``, the least
    recently used blocks are removed, the deepest first among equals, until ``prune_target_ratio`` of
    ``max_blocks`` are left. A call removes 4,096 blocks at most, and ``touch`` as many more as its prompt
    has; the following calls remove the rest. ``now_s`` must not decrease.
    """

    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """Record a decision that sends the prompt to the slot; remove blocks as ``expire`` does."""

    def overlap(self, prompt: Prompt, out: OverlapColumn, now_s: float) -> None:
        """Fill ``out`` as :meth:`BlockIndex.overlap` does, without expired blocks."""

    def expire(self, now_s: float) -> int:
        """Remove expired blocks, and those above ``max_blocks``; return how many this call removed."""

    def drop(self, slot: Slot) -> None:
        """Forget the slot's blocks: none counts any more. They are removed as expired ones are, also where
        another rank has the slot by then.
        """

    def stats(self) -> ApproximateStats:
        """Return the current sizes."""


NativeBlockIndex = _BlockIndex
"""The native :class:`BlockIndex`."""

NativeApproximateIndex = _ApproximateIndex
"""The native :class:`ApproximateIndex`."""

ContentIndex = _ContentIndex
"""The index of a simulation, whose engines name blocks by their content and lose no event."""

PrefixSet = _PrefixSet
"""The blocks of all prompts so far: an unlimited cache that all workers share."""
