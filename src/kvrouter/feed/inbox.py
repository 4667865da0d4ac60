"""The batches that wait while a feed recovers: sorted by id, per epoch, bounded."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core.events import KvBatch, KvEvent
from kvrouter.core.ids import Epoch, EventId


class Added(Enum):
    """What became of a batch that was offered."""

    KEPT = auto()
    REPEATED = auto()
    KEPT_AND_FULL = auto()


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive events: event ``i`` has the id ``first + i``."""

    first: EventId
    events: tuple[KvEvent, ...]

    @property
    def next_event_id(self) -> EventId:
        """The id that follows the run."""
        return EventId(self.first + len(self.events))


@dataclass(slots=True)
class _Shelf:
    """The batches of one epoch by first id; ``seen_at_ticket``: the latest ask when its first batch came."""

    batches: list[KvBatch]
    seen_at_ticket: int


class Inbox:
    """Holds batches that weigh up to ``events_max`` events. Full: only the highest batch of each epoch stays.

    The highest ids are what must not be forgotten: they tell how far a recovery has to reach.
    """

    __slots__ = ("_epochs_max", "_events", "_events_max", "_shelves")

    def __init__(self, *, events_max: int, epochs_max: int) -> None:
        self._events_max = events_max
        self._epochs_max = epochs_max
        self._shelves: dict[Epoch, _Shelf] = {}
        self._events = 0

    def __bool__(self) -> bool:
        return bool(self._shelves)

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs held, the one met first before the others."""
        return list(self._shelves)

    @property
    def latest_epoch(self) -> Epoch | None:
        """The epoch that was met last, among those held."""
        return next(reversed(self._shelves), None)

    def has(self, epoch: Epoch) -> bool:
        """Whether a batch of ``epoch`` is held."""
        return epoch in self._shelves

    def has_other_than(self, epoch: Epoch) -> bool:
        """Whether a batch of another epoch is held."""
        return len(self._shelves) > (epoch in self._shelves)

    def epochs_seen_before(self, ticket: int) -> list[Epoch]:
        """The held epochs that were met before the ask ``ticket`` was made."""
        return [epoch for epoch, shelf in self._shelves.items() if shelf.seen_at_ticket < ticket]

    def add(self, batch: KvBatch, *, ticket: int) -> Added:
        """Keep ``batch``; ``ticket`` is that of the latest ask."""
        shelf = self._shelves.get(batch.epoch)
        if shelf is None:
            shelf = self._shelves[batch.epoch] = _Shelf([], ticket)
            if len(self._shelves) > self._epochs_max:
                self.drop(next(iter(self._shelves)))
        at = bisect_left(shelf.batches, batch.first_event_id, key=_first_id)
        if _covers(shelf.batches[max(0, at - 1) : at + 1], batch):
            return Added.REPEATED
        shelf.batches.insert(at, batch)
        self._events += batch.weight
        if self._events > self._events_max:
            self._keep_highest()
            return Added.KEPT_AND_FULL
        return Added.KEPT

    def first_id(self, epoch: Epoch) -> EventId | None:
        """The lowest id held of ``epoch``."""
        shelf = self._shelves.get(epoch)
        return shelf.batches[0].first_event_id if shelf else None

    def reach(self, epoch: Epoch, start: EventId) -> EventId:
        """The id up to which what is held carries on from ``start``; ``start`` itself when it does not."""
        shelf = self._shelves.get(epoch)
        for batch in shelf.batches if shelf else ():
            if batch.first_event_id > start:
                break
            start = max(start, batch.next_event_id)
        return start

    def first_after(self, epoch: Epoch, last: EventId) -> EventId | None:
        """The first id above ``last`` with which a held batch of ``epoch`` begins."""
        shelf = self._shelves.get(epoch)
        firsts = (batch.first_event_id for batch in shelf.batches) if shelf else iter(())
        return next((first for first in firsts if first > last), None)

    def drop_from(self, epoch: Epoch, first: EventId) -> None:
        """Let go of the batches of ``epoch`` that begin with ``first`` or later."""
        shelf = self._shelves.get(epoch)
        if shelf is None:
            return
        at = bisect_left(shelf.batches, first, key=_first_id)
        self._forget(shelf.batches[at:])
        del shelf.batches[at:]
        if not shelf.batches:
            del self._shelves[epoch]

    def is_gapless(self, epoch: Epoch, start: EventId) -> bool:
        """Whether everything held of ``epoch`` carries on from ``start``."""
        shelf = self._shelves.get(epoch)
        if shelf is None:
            return True
        return self.reach(epoch, start) >= max(batch.next_event_id for batch in shelf.batches)

    def take_run(self, epoch: Epoch, start: EventId) -> Run:
        """Take out everything that carries on from ``start``; what lies before ``start`` is let go."""
        shelf = self._shelves.get(epoch)
        events: list[KvEvent] = []
        taken = 0
        for batch in shelf.batches if shelf else ():
            following = EventId(start + len(events))
            if batch.first_event_id > following:
                break
            events.extend(batch.events[following - batch.first_event_id :])
            taken += 1
        if shelf is not None:
            self._forget(shelf.batches[:taken])
            del shelf.batches[:taken]
            if not shelf.batches:
                del self._shelves[epoch]
        return Run(start, tuple(events))

    def take_last_run(self, epoch: Epoch) -> Run:
        """Take out the consecutive events that end at the highest id of ``epoch``, and let go of the rest."""
        shelf = self._shelves[epoch]
        start = end = shelf.batches[0].first_event_id
        for batch in shelf.batches:
            if batch.first_event_id > end:
                start = batch.first_event_id
            end = max(end, batch.next_event_id)
        shelf.batches = [batch for batch in shelf.batches if batch.first_event_id >= start]
        run = self.take_run(epoch, start)
        self.clear()
        return run

    def drop(self, epoch: Epoch) -> None:
        """Let go of everything of ``epoch``."""
        shelf = self._shelves.pop(epoch, None)
        if shelf is not None:
            self._forget(shelf.batches)

    def clear(self) -> None:
        """Let go of everything."""
        self._shelves.clear()
        self._events = 0

    def _keep_highest(self) -> None:
        for shelf in self._shelves.values():
            highest = max(shelf.batches, key=lambda batch: batch.next_event_id)
            self._forget(batch for batch in shelf.batches if batch is not highest)
            shelf.batches = [highest]

    def _forget(self, batches: Iterable[KvBatch]) -> None:
        self._events -= sum(batch.weight for batch in batches)


def _first_id(batch: KvBatch) -> EventId:
    return batch.first_event_id


def _covers(neighbours: Iterable[KvBatch], batch: KvBatch) -> bool:
    return any(
        near.first_event_id <= batch.first_event_id and batch.next_event_id <= near.next_event_id
        for near in neighbours
    )
