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
class _EpochBatches:
    """The batches of one epoch by first id; ``seen_at_ticket``: the latest ask when its first batch came."""

    batches: list[KvBatch]
    seen_at_ticket: int


class Inbox:
    """Holds batches that weigh up to ``events_max`` events. Full: only the highest batch of each epoch stays.

    The highest ids are what must not be forgotten: they show how far a recovery has to reach.
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
        """The epochs held, the one met first before the others."""
        return list(self._by_epoch)

    @property
    def latest_epoch(self) -> Epoch | None:
        """The epoch that was met last, among those held."""
        return next(reversed(self._by_epoch), None)

    def has(self, epoch: Epoch) -> bool:
        """Whether a batch of ``epoch`` is held."""
        return epoch in self._by_epoch

    def has_other_than(self, epoch: Epoch) -> bool:
        """Whether a batch of another epoch is held."""
        return len(self._by_epoch) > (epoch in self._by_epoch)

    def epochs_seen_before(self, ticket: int) -> list[Epoch]:
        """The held epochs that were met before the ask ``ticket`` was made."""
        return [epoch for epoch, held in self._by_epoch.items() if held.seen_at_ticket < ticket]

    def add(self, batch: KvBatch, *, ticket: int) -> Added:
        """Keep ``batch``; ``ticket`` is that of the latest ask."""
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
        """The lowest id held of ``epoch``."""
        held = self._by_epoch.get(epoch)
        return held.batches[0].first_event_id if held else None

    def reach(self, epoch: Epoch, start: EventId) -> EventId:
        """The id up to which what is held carries on from ``start``; ``start`` itself when it does not."""
        held = self._by_epoch.get(epoch)
        for batch in held.batches if held else ():
            if batch.first_event_id > start:
                break
            start = max(start, batch.next_event_id)
        return start

    def first_after(self, epoch: Epoch, last: EventId) -> EventId | None:
        """The first id above ``last`` with which a held batch of ``epoch`` begins."""
        held = self._by_epoch.get(epoch)
        firsts = (batch.first_event_id for batch in held.batches) if held else iter(())
        return next((first for first in firsts if first > last), None)

    def drop_from(self, epoch: Epoch, first: EventId) -> None:
        """Drop the batches of ``epoch`` that begin with ``first`` or later."""
        held = self._by_epoch.get(epoch)
        if held is None:
            return
        at = bisect_left(held.batches, first, key=_first_id)
        self._forget(held.batches[at:])
        del held.batches[at:]
        if not held.batches:
            del self._by_epoch[epoch]

    def is_gapless(self, epoch: Epoch, start: EventId) -> bool:
        """Whether everything held of ``epoch`` carries on from ``start``."""
        held = self._by_epoch.get(epoch)
        if held is None:
            return True
        return self.reach(epoch, start) >= max(batch.next_event_id for batch in held.batches)

    def take_run(self, epoch: Epoch, start: EventId) -> Run:
        """Take out everything that carries on from ``start``; what lies before ``start`` is dropped."""
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
        """Take out the consecutive events that end at the highest id of ``epoch``, and drop the rest."""
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
        """Drop everything of ``epoch``."""
        held = self._by_epoch.pop(epoch, None)
        if held is not None:
            self._forget(held.batches)

    def clear(self) -> None:
        """Drop everything."""
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
