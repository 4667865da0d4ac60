"""The slots of a fleet: the worker rank at each slot, and the columns over slots."""

import heapq

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.kernel.fleet.columns import Columns, PlaceColumns, Policies, hash_rank


class Slots:
    """Allocates slots to worker ranks; the lowest free slot is reused first. ``ranks`` has the rank at each
    slot, None for a free one, and has the length of every column.
    """

    def __init__(self) -> None:
        self.columns = Columns()
        self.places = PlaceColumns()
        self.policies = Policies()
        self.ranks: list[WorkerRank | None] = []
        self._free: list[Slot] = []

    def copy(self) -> "Slots":
        """Return a copy of the slots and their columns."""
        copied = Slots()
        copied.columns, copied.places = self.columns.copy(), self.places.copy()
        copied.policies, copied.ranks = self.policies.copy(), list(self.ranks)
        copied._free = list(self._free)
        return copied

    @property
    def in_use(self) -> int:
        """The number of slots with a rank."""
        return len(self.ranks) - len(self._free)

    def take(self, rank: WorkerRank) -> Slot:
        """Allocate a slot to the rank and return it."""
        if self._free:
            slot = heapq.heappop(self._free)
            self.ranks[slot] = rank
        else:
            slot = Slot(len(self.ranks))
            self.ranks.append(rank)
            self._resize()
        self.columns.write(slot, "present", True)
        self.columns.write(slot, "worker_id", rank.worker_id)
        self.columns.write(slot, "dp_rank", rank.dp_rank)
        self.columns.write(slot, "rank_hash", hash_rank(rank))
        return slot

    def free(self, slot: Slot) -> Slot:
        """Free the slot and return it."""
        self.ranks[slot] = None
        self.columns.clear(slot)
        self.places.put(slot, {}, frozenset())
        self.policies.remove(slot)
        heapq.heappush(self._free, slot)
        return slot

    def trim(self) -> None:
        """Remove free slots at the end."""
        n_slots = len(self.ranks)
        while n_slots and self.ranks[n_slots - 1] is None:
            n_slots -= 1
        if n_slots < len(self.ranks):
            del self.ranks[n_slots:]
            self._free = [slot for slot in self._free if slot < n_slots]
            heapq.heapify(self._free)
            self._resize()

    def _resize(self) -> None:
        self.columns.resize(len(self.ranks))
        self.places.resize(len(self.ranks))
