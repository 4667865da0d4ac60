"""The block index: which ranks hold which blocks, by the engines' KV events or predicted from decisions.

A slot is a small dense int that stands for one worker rank.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouter._native import ApproximateIndex as _ApproximateIndex
from kvrouter._native import BlockIndex as _BlockIndex
from kvrouter._native import PrefixSet as _PrefixSet
from kvrouter.core.events import Held, KvEvent, Medium
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot

OverlapColumn = npt.NDArray[np.uint32]
"""Leading blocks of a prompt that each slot holds; as long as the slots in use, or longer."""

SLOTS_MAX = 1 << 16
"""Slots are below this."""


class Applied(Protocol):
    """What became of the blocks of some events."""

    @property
    def stored(self) -> int:
        """Blocks that the rank did not hold before, in that medium."""

    @property
    def repeated(self) -> int:
        """Stores of a block that the rank holds already: each needs a removal of its own."""

    @property
    def replaced(self) -> int:
        """Blocks whose engine hash stood for other content, which is thereby forgotten."""

    @property
    def removed(self) -> int:
        """Removals of a block that the rank held, the ones that leave another store in place included."""

    @property
    def unknown_removed(self) -> int:
        """Removals of a block that the rank did not hold."""

    @property
    def orphaned(self) -> int:
        """Blocks whose parent the rank does not hold: not placed, and a reason to recover."""

    @property
    def cleared(self) -> int:
        """Blocks that the rank held and that went all at once."""

    @property
    def over_limit(self) -> int:
        """Blocks beyond ``blocks_per_rank_max``: not placed."""


class IndexStats(Protocol):
    """Sizes. Tuples go by medium, in the order of :class:`Medium`."""

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Held blocks: one for each engine hash of each rank."""

    @property
    def sequences(self) -> tuple[int, int, int, int]:
        """Distinct sequence hashes."""

    @property
    def ranks(self) -> int:
        """Ranks that hold a block in some medium."""

    @property
    def bytes(self) -> int:
        """Memory."""


class BlockIndex(Protocol):
    """Who holds which blocks, as the engines' events say."""

    def apply(self, slot: Slot, events: Sequence[KvEvent | Held]) -> Applied:
        """Apply events of one rank, or parts of its snapshot, in order; none of them if one is malformed."""

    def drop_some(self, slot: Slot) -> Applied:
        """Forget some of what the rank holds, a few thousand blocks at most: ``cleared`` says how many.

        Again and again until that is 0: then the rank holds nothing. No call takes long, however much it
        holds; where time is no matter, apply ``Cleared``.
        """

    def dump(self, slot: Slot) -> list[Held]:
        """Return a snapshot of the rank: applied to an empty rank anywhere, it gives an equal one, store
        counts included. Takes as long as the rank is big.
        """

    def dump_some(self, slot: Slot, place: int = 0) -> tuple[list[Held], int] | None:
        """Return some of what the rank holds, a few thousand blocks, and the place of what follows.

        From place 0 on until None comes, this is what :meth:`dump` gives, in another order, if nothing was
        applied to the rank meanwhile.
        """

    def overlap(self, prompt: Prompt, out: OverlapColumn, medium: Medium = Medium.GPU) -> None:
        """Fill ``out`` with the longest contiguous prefix of the prompt's blocks that each slot holds.

        Raises ValueError when ``out`` is shorter than the slots in use.
        """

    def held(self, slot: Slot, medium: Medium = Medium.GPU) -> int:
        """How many blocks the rank holds."""

    def stats(self) -> IndexStats:
        """Sizes now."""


class ApproximateStats(Protocol):
    """Sizes of an approximate index."""

    @property
    def blocks(self) -> int:
        """Predicted blocks: one for each slot that is thought to hold it."""

    @property
    def bytes(self) -> int:
        """Memory."""


class ApproximateIndex(Protocol):
    """Who may hold which blocks, predicted from routing decisions alone.

    A block is thought to be held for ``ttl_s`` after the last decision for it. When there are more than
    ``max_blocks``, the least recently used go, the deepest first among equals, until ``prune_target_ratio``
    of ``max_blocks`` are left. ``now_s`` never goes back.
    """

    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """A decision sends the prompt to the slot."""

    def overlap(self, prompt: Prompt, out: OverlapColumn, now_s: float) -> None:
        """Fill ``out`` as :meth:`BlockIndex.overlap` does, without the blocks whose time is over."""

    def expire(self, now_s: float) -> int:
        """Forget the blocks whose time is over; return how many."""

    def drop(self, slot: Slot) -> int:
        """Forget the slot; return how many blocks it was thought to hold."""

    def stats(self) -> ApproximateStats:
        """Sizes now."""


NativeBlockIndex = _BlockIndex
"""A :class:`BlockIndex` in the native core."""

NativeApproximateIndex = _ApproximateIndex
"""An :class:`ApproximateIndex` in the native core."""

PrefixSet = _PrefixSet
"""What an endless cache shared by all would hold."""
