"""The cache view: the port that returns each rank's overlap; predicted from decisions, or always zero."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrouter.core.events import KvBatch
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.index import ApproximateIndex
from kvrouter.kernel.routing.request import Decision

U32 = npt.NDArray[np.uint32]


class CacheView(Protocol):
    """Overlaps for a decision, and what a decision teaches."""

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, has_media: bool = False) -> U32 | None:
        """Leading blocks of ``prompt`` that each slot holds; None when caches are not used.

        The array is reused by the next call.
        """

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, has_media: bool = False) -> None:
        """The prompt's blocks will be where the decision sends it."""

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """A worker rank that publishes KV events is at the slot."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """So many blocks the slot's rank can hold on its GPU, as far as it says; None where it does not.
        Its worker has ``n_ranks``.
        """

    def freed(self, slot: Slot) -> None:
        """The slot's worker rank is gone, and its cache with it."""

    def is_sure_of(self, slot: Slot) -> bool:
        """Whether what the slot holds is known, all of it, and not guessed."""

    def doubt(self, slot: Slot) -> None:
        """The engine's own answers contradict what is believed of the slot."""

    def on_batch(self, batch: KvBatch) -> None:
        """KV events came."""

    def close(self) -> None:
        """Stop what runs."""


class NoCacheView:
    """``--kv-overlap-score-weight 0``, or a mode that asks no costs: no index is built."""

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, has_media: bool = False) -> U32 | None:  # noqa: ARG002 - the port's signature
        """Caches are not used."""
        return None

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, has_media: bool = False) -> None:
        """Nothing to learn."""

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Nothing to ask."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Nothing is held."""

    def freed(self, slot: Slot) -> None:
        """Nothing to forget."""

    def is_sure_of(self, slot: Slot) -> bool:  # noqa: ARG002 - the port's signature
        """Nothing is known."""
        return False

    def doubt(self, slot: Slot) -> None:
        """Nothing is believed."""

    def on_batch(self, batch: KvBatch) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """Nothing runs."""


class PredictedCacheView:
    """``--no-kv-events``: a decision predicts that its workers will hold the prompt's blocks for a while."""

    def __init__(self, index: ApproximateIndex) -> None:
        self.index = index
        self._out: U32 = np.zeros(16, np.uint32)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, has_media: bool = False) -> U32:  # noqa: ARG002 - the port's signature
        """Leading blocks that are believed to be held, by slot."""
        if len(self._out) < n_slots:
            self._out = np.zeros(max(n_slots, 2 * len(self._out)), np.uint32)
        out = self._out[:n_slots]
        self.index.overlap(prompt, out, now_s)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, has_media: bool = False) -> None:  # noqa: ARG002 - the port's signature
        """Both workers of a pair will hold the prompt's blocks."""
        self.index.touch(decision.decode.slot, prompt, now_s)
        if decision.prefill is not None:
            self.index.touch(decision.prefill.slot, prompt, now_s)

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Events are not followed."""

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """What is predicted has a limit of its own."""

    def freed(self, slot: Slot) -> None:
        """Forget the slot."""
        self.index.drop(slot)

    def is_sure_of(self, slot: Slot) -> bool:  # noqa: ARG002 - the port's signature
        """Predictions are no knowledge."""
        return False

    def doubt(self, slot: Slot) -> None:
        """Predictions are no knowledge: there is nobody to ask."""

    def on_batch(self, batch: KvBatch) -> None:
        """Events are not followed."""

    def close(self) -> None:
        """Nothing runs."""
