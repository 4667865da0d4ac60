"""The cache view of a replay: each rank's KV events, through its feed, into the index, at once."""

from typing import cast

import numpy as np
import numpy.typing as npt

from kvrouter.core.events import KvBatch, KvEvent, KvSnapshot
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, EventId, Slot, WorkerRank
from kvrouter.engines.mock_engine.ranks import KvEvents
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import Apply, AskSnapshot, Command, Empty, Load
from kvrouter.kernel.index import ApproximateIndex, BlockIndex
from kvrouter.kernel.placement.cache_view import UnreportedRanks
from kvrouter.kernel.routing.interface import Decision

U32 = npt.NDArray[np.uint32]


class _Source:
    """One rank that publishes: its feed, its slot, and the id of its next event."""

    __slots__ = ("epoch", "feed", "next_event_id", "slot")

    def __init__(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        self.feed = RankFeed(rank)
        self.slot = slot
        self.epoch = epoch
        self.next_event_id = EventId(0)


class EventCacheView:
    """A :class:`~kvrouter.kernel.placement.cache_view.CacheView` that no event is lost on its way to."""

    def __init__(self, index: BlockIndex, predicted: ApproximateIndex) -> None:
        self.index = index
        self._unreported = UnreportedRanks(predicted)
        self._sources: dict[WorkerRank, _Source] = {}
        self._by_slot: dict[Slot, _Source] = {}
        self._out: U32 = np.zeros(0, np.uint32)

    def publish(self, rank: WorkerRank, events: KvEvents, *, now_s: float) -> None:
        """A rank's engine published these; of a rank that left they are dropped."""
        source = self._sources.get(rank)
        if source is None:
            return
        # the feed and the index read a batch as a sequence: making objects of its events costs much of a
        # replay with short blocks
        batch = KvBatch(rank, source.epoch, source.next_event_id, cast("tuple[KvEvent, ...]", events))
        source.next_event_id = batch.next_event_id
        self._carry_out(source, source.feed.on_batch(batch, now_s=now_s), now_s)

    def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, has_media: bool = False) -> U32:  # noqa: ARG002 - the port's signature
        """Leading blocks held, by slot; predicted for ranks that publish no KV events."""
        if len(self._out) != n_slots:
            self._out = np.zeros(n_slots, np.uint32)
        out = self._out
        self.index.overlap(prompt, out)
        self._unreported.fill(out, prompt, now_s=now_s)
        return out

    def decided(self, decision: Decision, prompt: Prompt, *, now_s: float, has_media: bool = False) -> None:  # noqa: ARG002 - the port's signature
        """The engines' own events will report it; for ranks without any it is predicted."""
        for leg in (decision.decode, decision.prefill):
            if leg is not None and leg.slot not in self._by_slot:
                self._unreported.decided(leg.slot, prompt, now_s=now_s)

    def joined(self, rank: WorkerRank, slot: Slot, epoch: Epoch) -> None:
        """Begin its feed with an empty engine."""
        source = self._sources[rank] = self._by_slot[slot] = _Source(rank, slot, epoch)
        self._carry_out(source, source.feed.on_new_epoch(epoch, now_s=0.0), 0.0)

    def set_total_blocks(self, slot: Slot, total_blocks: int | None, *, n_ranks: int) -> None:
        """Does nothing: mock engines never hold more blocks than they have."""

    def freed(self, slot: Slot) -> None:
        """The slot's worker rank is gone, and its cache with it."""
        source = self._by_slot.pop(slot, None)
        if source is not None and self._sources.get(source.feed.rank) is source:
            del self._sources[source.feed.rank]
        self._unreported.freed(slot)
        self._drop(slot)

    def is_sure_of(self, slot: Slot) -> bool:
        """No event is lost."""
        return slot in self._by_slot

    def doubt(self, slot: Slot) -> None:
        """Does nothing: no event is lost in a replay."""

    def on_batch(self, batch: KvBatch) -> None:
        """Batches are made here, of what engines publish."""

    def close(self) -> None:
        """Nothing runs."""

    def _carry_out(self, source: _Source, commands: list[Command], now_s: float) -> None:
        for command in commands:
            match command:
                case Apply(events):
                    self.index.apply(source.slot, events)
                case AskSnapshot(ticket):
                    feed = source.feed
                    feed.on_asked(ticket, now_s=now_s)
                    held = KvSnapshot(feed.rank, source.epoch, source.next_event_id, ())
                    self._carry_out(source, feed.on_snapshot(ticket, held, now_s=now_s), now_s)
                case Empty() | Load():
                    self._drop(source.slot)

    def _drop(self, slot: Slot) -> None:
        while self.index.drop_some(slot).cleared:
            pass
