"""The cache view of a model whose engines publish KV events."""

import numpy as np
import numpy.typing as npt

from kvrouter.core.events import KvBatch
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, Slot, WorkerRank
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import ApproximateIndex, BlockIndex
from kvrouter.kernel.placement.cache_view import PredictedCacheView, UnreportedRanks
from kvrouter.kernel.routing.interface import Decision
from kvrouter.router.event_ingest import EventIngest

U32 = npt.NDArray[np.uint32]


class EventCacheView:
    """The cache view of KV events. A rank whose feed recovers does not score. The caches of ranks without KV
    events are predicted from decisions.

    Blocks after an image, and those of prompts that are not read here, are reported in tokens that only the
    engine knows, so they come from ``predicted``.
    """

    def __init__(self, index: BlockIndex, ingest: EventIngest, predicted: ApproximateIndex) -> None:
        self.index = index
        self.ingest = ingest
        self.predicted = predicted
        self._predicted = PredictedCacheView(predicted)
        self._unreported = UnreportedRanks(predicted)
        self._out: U32 = np.zeros(0, np.uint32)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32 | None:
        """Leading blocks of the prompt that each slot holds; always an array."""
        if len(self._out) != n_slots:
            self._out = np.zeros(n_slots, np.uint32)
        out = self._out
        self.index.overlap(prompt, out)
        if not self.ingest.all_score:
            out *= self.ingest.scores(n_slots)
        if is_guess:
            np.maximum(out, self._predicted.overlap(prompt, n_slots, now_s=now_s), out=out)
        else:
            self._unreported.fill(out, prompt, now_s=now_s)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, is_guess: bool = False) -> None:
        """Note the decision in the predictions, for guessed prompts and for ranks without KV events."""
        if is_guess:
            self._predicted.decided(decision, prompt, now_s=now_s)
            return
        for leg in (decision.decode, decision.prefill):
            if leg is not None and self.ingest.feed_at(leg.slot) is None:
                self._unreported.decided(leg.slot, prompt, now_s=now_s)

    def expire(self, now_s: float) -> None:
        """Remove expired predictions."""
        self.predicted.expire(now_s)

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Start the rank's feed."""
        self.ingest.joined(rank, slot, epoch)

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Set how many blocks the slot's rank can hold; more are not accepted."""
        self.ingest.set_total_blocks(slot, total_blocks, n_ranks=n_ranks)

    def freed(self, slot: Slot) -> None:
        """Drop the slot's feed and blocks."""
        self.ingest.freed(slot)
        self._unreported.freed(slot)
        self._predicted.freed(slot)

    def is_sure_of(self, slot: Slot) -> bool:
        """Whether the index has every event of the slot's rank, as far as its feed knows."""
        feed = self.ingest.feed_at(slot)
        return feed is not None and feed.state is FeedState.LIVE

    def doubt(self, slot: Slot) -> None:
        """Request a snapshot of the slot's rank."""
        self.ingest.doubt(slot)

    def on_batch(self, batch: KvBatch) -> None:
        """Pass a batch to its rank's feed."""
        self.ingest.on_batch(batch)

    def close(self) -> None:
        """Stop the feeds."""
        self.ingest.close()
