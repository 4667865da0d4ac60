"""The cache view of a replay: each rank's KV events, into the index, at once.

No event is lost on its way, so that no feed has to look for gaps.
"""

import numpy as np
import numpy.typing as npt

from kvrouter.core.events import KvBatch, KvEvents
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.index import ApproximateIndex, ContentIndex
from kvrouter.kernel.placement.cache_view import UnreportedRanks
from kvrouter.kernel.routing.interface import Decision

U32 = npt.NDArray[np.uint32]


class EventCacheView:
    """A :class:`~kvrouter.kernel.placement.cache_view.CacheView` that no event is lost on its way to."""

    def __init__(self, index: ContentIndex, predicted: ApproximateIndex) -> None:
        self.index = index
        self._unreported = UnreportedRanks(predicted)
        self._slots: dict[WorkerRank, Slot] = {}
        self._ranks: dict[Slot, WorkerRank] = {}
        """The ranks that publish."""
        self._out: U32 = np.zeros(0, np.uint32)

    def publish(self, rank: WorkerRank, events: KvEvents) -> None:
        """A rank's engine published these; of a rank that left they are dropped."""
        slot = self._slots.get(rank)
        if slot is not None:
            self.index.apply(slot, events)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32:  # noqa: ARG002 - the port's signature
        """Leading blocks held, by slot; predicted for ranks that publish no KV events."""
        if len(self._out) != n_slots:
            self._out = np.zeros(n_slots, np.uint32)
        out = self._out
        self.index.overlap(prompt, out)
        self._unreported.fill(out, prompt, now_s=now_s)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, is_guess: bool = False) -> None:  # noqa: ARG002 - the port's signature
        """The engines' own events will report it; for ranks without any it is predicted."""
        for leg in (decision.decode, decision.prefill):
            if leg is not None and leg.slot not in self._ranks:
                self._unreported.decided(leg.slot, prompt, now_s=now_s)

    def expire(self, now_s: float) -> None:
        """Does nothing: in a replay each decision removes expired blocks."""

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:  # noqa: ARG002 - the port's signature
        """Its engine is new, and empty."""
        self._slots[rank], self._ranks[slot] = slot, rank

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Does nothing: mock engines never hold more blocks than they have."""

    def freed(self, slot: Slot) -> None:
        """The slot's worker rank is gone, and its cache with it."""
        rank = self._ranks.pop(slot, None)
        if rank is not None and self._slots.get(rank) == slot:
            del self._slots[rank]
        self._unreported.freed(slot)
        self.index.drop_rank(slot)

    def is_sure_of(self, slot: Slot) -> bool:
        """No event is lost."""
        return slot in self._ranks

    def doubt(self, slot: Slot) -> None:
        """Does nothing: no event is lost in a replay."""

    def on_batch(self, batch: KvBatch) -> None:
        """Batches are made here, of what engines publish."""

    def close(self) -> None:
        """Nothing runs."""
