"""The cache view: the port that returns each rank's overlap; predicted from decisions, or always None."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouter.core.events import KvBatch
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.index import ApproximateIndex
from kvrouter.kernel.routing.interface import Decision

U32 = npt.NDArray[np.uint32]


class CacheView(Protocol):
    """The cached blocks of each rank, as known from events or decisions."""

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32 | None:
        """Return the leading blocks of ``prompt`` that each slot holds; None when caches are not tracked.

        The next call reuses the array.
        """

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, is_guess: bool = False) -> None:
        """Record a decision: the prompt's blocks will be at its ranks."""

    def expire(self, now_s: float) -> None:
        """Remove some of the predicted blocks whose time is over; called about once a second."""

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Add a worker rank that publishes KV events."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Set the number of GPU blocks of the slot's rank; None when unknown. Its worker has ``n_ranks``."""

    def freed(self, slot: Slot) -> None:
        """Remove the slot's worker rank and its cached blocks."""

    def is_sure_of(self, slot: Slot) -> bool:
        """Whether the slot's blocks are known completely, from events and not from predictions."""

    def doubt(self, slot: Slot) -> None:
        """Handle an engine's answer that contradicts the known blocks of the slot."""

    def on_batch(self, batch: KvBatch) -> None:
        """Handle a batch of KV events."""

    def close(self) -> None:
        """Stop background work."""


class NoCacheView:
    """No cache view: for ``--kv-overlap-score-weight 0`` or a mode without costs; no index is built."""

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32 | None:  # noqa: ARG002 - the port's signature
        """Return None: caches are not tracked."""
        return None

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, is_guess: bool = False) -> None:
        """Do nothing."""

    def expire(self, now_s: float) -> None:
        """Do nothing."""

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Do nothing."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Do nothing."""

    def freed(self, slot: Slot) -> None:
        """Do nothing."""

    def is_sure_of(self, slot: Slot) -> bool:  # noqa: ARG002 - the port's signature
        """Return False: no blocks are known."""
        return False

    def doubt(self, slot: Slot) -> None:
        """Do nothing."""

    def on_batch(self, batch: KvBatch) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PredictedCacheView:
    """Predicted caches, for ``--no-kv-events``: a decision's workers will hold its prompt for a while."""

    def __init__(self, index: ApproximateIndex) -> None:
        self.index = index
        self._out: U32 = np.zeros(0, np.uint32)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32:  # noqa: ARG002 - the port's signature
        """Return the leading blocks that each slot is predicted to hold."""
        if len(self._out) != n_slots:
            self._out = np.zeros(n_slots, np.uint32)
        out = self._out
        self.index.overlap(prompt, out, now_s)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, is_guess: bool = False) -> None:  # noqa: ARG002 - the port's signature
        """Predict that the workers of both legs hold the prompt's blocks."""
        self.index.touch(decision.decode.slot, prompt, now_s)
        if decision.prefill is not None:
            self.index.touch(decision.prefill.slot, prompt, now_s)

    def expire(self, now_s: float) -> None:
        """Remove expired blocks."""
        self.index.expire(now_s)

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Do nothing: events are not followed."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Do nothing: the predicted index has a limit for all ranks."""

    def freed(self, slot: Slot) -> None:
        """Remove the slot's blocks."""
        self.index.drop(slot)

    def is_sure_of(self, slot: Slot) -> bool:  # noqa: ARG002 - the port's signature
        """Return False: blocks are predicted."""
        return False

    def doubt(self, slot: Slot) -> None:
        """Do nothing: the worker cannot be asked for its blocks."""

    def on_batch(self, batch: KvBatch) -> None:
        """Do nothing: events are not followed."""

    def close(self) -> None:
        """Do nothing."""


class UnreportedRanks:
    """Predicted caches of the ranks that publish no KV events, beside an index of the others' events.

    ``index`` may hold predictions for other ranks too, which do not count here.
    """

    def __init__(self, index: ApproximateIndex) -> None:
        self._index = index
        self._is_unreported = np.zeros(16, np.bool_)
        self._n_unreported = 0
        self._predicted: U32 = np.zeros(16, np.uint32)

    def decided(self, slot: Slot, prompt: Prompt, *, now_s: float) -> None:
        """Predict that the slot's rank, which publishes no KV events, will hold the prompt's blocks."""
        self._hold(slot + 1)
        self._n_unreported += not self._is_unreported[slot]
        self._is_unreported[slot] = True
        self._index.touch(slot, prompt, now_s)

    def fill(self, out: U32, prompt: Prompt, *, now_s: float) -> None:
        """Write the leading blocks that these ranks are predicted to hold into ``out``."""
        if not self._n_unreported:
            return
        self._hold(len(out))  # the index may have slots of other ranks, behind all of these
        predicted = self._predicted[: len(out)]
        self._index.overlap(prompt, predicted, now_s)
        np.copyto(out, predicted, where=self._is_unreported[: len(out)])

    def freed(self, slot: Slot) -> None:
        """Remove the slot's blocks."""
        if slot < len(self._is_unreported) and self._is_unreported[slot]:
            self._is_unreported[slot] = False
            self._n_unreported -= 1
            self._index.drop(slot)

    def _hold(self, n_slots: int) -> None:
        """Have a place for each of ``n_slots``."""
        held = len(self._is_unreported)
        if n_slots > held:
            grown = np.zeros(max(n_slots, 2 * held), np.bool_)
            grown[:held] = self._is_unreported
            self._is_unreported, self._predicted = grown, np.zeros(len(grown), np.uint32)
