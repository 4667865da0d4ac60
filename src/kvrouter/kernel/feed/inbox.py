"""The bounded buffer of batches that wait while a feed recovers, sorted by id for each epoch."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core.events import KvBatch, KvEvent
from kvrouter.core.ids import Epoch, EventId


class Added(Enum):
    """The result of adding a batch."""

    KEPT = auto()
    REPEATED = auto()
    KEPT_AND_FULL = auto()


@dataclass(frozen=True, slots=True)
class Run:
    """A run of consecutive events: event ``i`` has the id ``first + i``."""

    first: EventId
    events: tuple[KvEvent, ...]

    @property
    def next_event_id(self) -> EventId:
        """The id that follows the run."""
        return EventId(self.first + len(self.events))


@dataclass(slots=True)
class _EpochBatches:
    """An epoch's batches, sorted by first id; ``known_at_ticket``: the latest ask at its first batch."""

    batches: list[KvBatch]
    known_at_ticket: int


class Inbox:
    """Holds batches up to a total weight of ``events_max``. When full, it keeps each epoch's highest batch.

    The highest ids are kept because they show how far a recovery has to reach.
    """

    __slots__ = ("_by_epoch", "_epochs_max", "_events", "_events_max")

    def __init__(self, *, events_max: int, epochs_max: int) -> None:
        self._events_max = events_max
        self._epochs_max = epochs_max
        self._by_epoch: dict[Epoch, _EpochBatches] = {}
        self._events = 0

    def __bool__(self) -> bool:
        return bool(self._by_epoch)

    @property
    def epochs(self) -> list[Epoch]:
        """The held epochs, in the order in which they first arrived."""
        return list(self._by_epoch)

    @property
    def latest_epoch(self) -> Epoch | None:
        """The held epoch that arrived last; None when the inbox is empty."""
        return next(reversed(self._by_epoch), None)

    def has(self, epoch: Epoch) -> bool:
        """Whether the inbox holds a batch of ``epoch``."""
        return epoch in self._by_epoch

    def has_other_than(self, epoch: Epoch) -> bool:
        """Whether the inbox holds a batch of another epoch."""
        return len(self._by_epoch) > (epoch in self._by_epoch)

    def epochs_known_before(self, ticket: int) -> list[Epoch]:
        """Return the held epochs that arrived before the ask ``ticket`` was made."""
        return [epoch for epoch, held in self._by_epoch.items() if held.known_at_ticket < ticket]

    def add(self, batch: KvBatch, *, ticket: int) -> Added:
        """Add ``batch``; ``ticket`` is that of the latest ask."""
        held = self._by_epoch.get(batch.epoch)
        if held is None:
            held = self._by_epoch[batch.epoch] = _EpochBatches([], ticket)
            if len(self._by_epoch) > self._epochs_max:
                self.drop(next(iter(self._by_epoch)))
        at = bisect_left(held.batches, batch.first_event_id, key=_first_id)
        if _covers(held.batches[max(0, at - 1) : at + 1], batch):
            return Added.REPEATED
        held.batches.insert(at, batch)
        self._events += batch.weight
        if self._events > self._events_max:
            self._keep_highest()
            return Added.KEPT_AND_FULL
        return Added.KEPT

    def first_id(self, epoch: Epoch) -> EventId | None:
        """Return the lowest held id of ``epoch``; None without one."""
        held = self._by_epoch.get(epoch)
        return held.batches[0].first_event_id if held else None

    def reach(self, epoch: Epoch, start: EventId) -> EventId:
        """Return the id after the consecutive held events from ``start``; ``start`` when there are none."""
        held = self._by_epoch.get(epoch)
        for batch in held.batches if held else ():
            if batch.first_event_id > start:
                break
            start = max(start, batch.next_event_id)
        return start

    def first_after(self, epoch: Epoch, last: EventId) -> EventId | None:
        """Return the first id above ``last`` at which a held batch of ``epoch`` begins; None without one."""
        held = self._by_epoch.get(epoch)
        firsts = (batch.first_event_id for batch in held.batches) if held else iter(())
        return next((first for first in firsts if first > last), None)

    def drop_from(self, epoch: Epoch, first: EventId) -> None:
        """Drop the batches of ``epoch`` that begin at ``first`` or later."""
        held = self._by_epoch.get(epoch)
        if held is None:
            return
        at = bisect_left(held.batches, first, key=_first_id)
        self._forget(held.batches[at:])
        del held.batches[at:]
        if not held.batches:
            del self._by_epoch[epoch]

    def is_gapless(self, epoch: Epoch, start: EventId) -> bool:
        """Whether the held events of ``epoch`` have no gap from ``start`` on."""
        held = self._by_epoch.get(epoch)
        if held is None:
            return True
        return self.reach(epoch, start) >= max(batch.next_event_id for batch in held.batches)

    def take_run(self, epoch: Epoch, start: EventId) -> Run:
        """Remove and return the consecutive events from ``start``; earlier events are dropped."""
        held = self._by_epoch.get(epoch)
        events: list[KvEvent] = []
        taken = 0
        for batch in held.batches if held else ():
            following = EventId(start + len(events))
            if batch.first_event_id > following:
                break
            events.extend(batch.events[following - batch.first_event_id :])
            taken += 1
        if held is not None:
            self._forget(held.batches[:taken])
            del held.batches[:taken]
            if not held.batches:
                del self._by_epoch[epoch]
        return Run(start, tuple(events))

    def take_last_run(self, epoch: Epoch) -> Run:
        """Remove and return the consecutive events that end at the highest id of ``epoch``; drop the rest."""
        held = self._by_epoch[epoch]
        start = end = held.batches[0].first_event_id
        for batch in held.batches:
            if batch.first_event_id > end:
                start = batch.first_event_id
            end = max(end, batch.next_event_id)
        held.batches = [batch for batch in held.batches if batch.first_event_id >= start]
        run = self.take_run(epoch, start)
        self.clear()
        return run

    def drop(self, epoch: Epoch) -> None:
        """Drop the batches of ``epoch``."""
        held = self._by_epoch.pop(epoch, None)
        if held is not None:
            self._forget(held.batches)

    def clear(self) -> None:
        """Drop all batches."""
        self._by_epoch.clear()
        self._events = 0

    def _keep_highest(self) -> None:
        for held in self._by_epoch.values():
            highest = max(held.batches, key=lambda batch: batch.next_event_id)
            self._forget(batch for batch in held.batches if batch is not highest)
            held.batches = [highest]

    def _forget(self, batches: Iterable[KvBatch]) -> None:
        self._events -= sum(batch.weight for batch in batches)


def _first_id(batch: KvBatch) -> EventId:
    return batch.first_event_id


def _covers(neighbours: Iterable[KvBatch], batch: KvBatch) -> bool:
    return any(
        near.first_event_id <= batch.first_event_id and batch.next_event_id <= near.next_event_id
        for near in neighbours
    )
