"""Clocks: one that stops while the event loop is blocked, the last change of a value, and due times."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)

_STALE_MIN = 64
"""The number of stale heap entries that are kept before the heap is rebuilt."""


LATE_TICKS = 2
"""A tick that takes longer than this many periods shows that the event loop was blocked."""


class AwakeClock:
    """A clock that stops while its event loop is blocked. It advances by ticks, of about ``every_s`` seconds.

    After a long block, the timers of a loop fire before it has read its peers' messages: by an ordinary clock
    all peers would appear dead.
    """

    __slots__ = ("every_s", "now_s")

    def __init__(self, every_s: float) -> None:
        self.now_s = 0.0
        self.every_s = every_s

    def advance(self, elapsed_s: float) -> bool:
        """Count a tick that took ``elapsed_s`` seconds; return whether the event loop was blocked in it.

        A blocked tick counts as one period, so that a peer asked in the tick before has one more to answer.
        """
        stood_still = elapsed_s > LATE_TICKS * self.every_s
        self.now_s += self.every_s if stood_still else elapsed_s
        return stood_still


class LastChange:
    """The moment at which a reader last saw a value change, in seconds of the reader's own clock.

    A claim in a store is alive while its value changes: clocks of different hosts are never compared.
    """

    __slots__ = ("_value", "at_s")

    def __init__(self) -> None:
        self._value: object = _NOTHING
        self.at_s = -inf

    def see(self, value: object, now_s: float) -> None:
        """Record the store's current value."""
        if value != self._value:
            self._value, self.at_s = value, now_s

    def is_within(self, lease_s: float, now_s: float) -> bool:
        """Whether the value changed less than ``lease_s`` seconds ago."""
        return now_s < self.at_s + lease_s


_NOTHING = object()


class DueTimes(Generic[Subject]):
    """A timer queue: one due time per subject, in seconds of any clock. Memory: a few entries a subject."""

    def __init__(self) -> None:
        self._due_s: dict[Subject, float] = {}
        self._heap: list[tuple[float, int, Subject]] = []
        self._number = 0

    def __len__(self) -> int:
        """The number of heap entries, stale ones included."""
        return len(self._heap)

    @property
    def waiting(self) -> int:
        """The number of subjects with a due time."""
        return len(self._due_s)

    def due_s(self, subject: Subject) -> float:
        """Return the due time of ``subject``; ``inf`` when it has none."""
        return self._due_s.get(subject, inf)

    @property
    def next_s(self) -> float:
        """A lower bound of the next due time; ``inf`` when there is none."""
        return self._heap[0][0] if self._heap else inf

    def put(self, subject: Subject, due_s: float) -> None:
        """Set the due time of ``subject``, in place of an earlier one."""
        if self._due_s.get(subject) == due_s:
            return
        self._due_s[subject] = due_s
        self._number += 1
        heappush(self._heap, (due_s, self._number, subject))
        if len(self._heap) > 2 * len(self._due_s) + _STALE_MIN:
            self._heap = [(due_s, at, each) for at, (each, due_s) in enumerate(self._due_s.items())]
            self._number = len(self._heap)
            heapify(self._heap)

    def drop(self, subject: Subject) -> None:
        """Remove the due time of ``subject``."""
        self._due_s.pop(subject, None)

    def take(self, now_s: float) -> list[Subject]:
        """Remove and return the subjects that are due, in the order of their due times."""
        taken = []
        while (subject := self.take_first(now_s)) is not None:
            taken.append(subject)
        return taken

    def take_first(self, now_s: float) -> Subject | None:
        """Remove and return the subject with the earliest due time; None when no subject is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now_s:
            return None
        _, _, subject = heappop(self._heap)
        del self._due_s[subject]
        self._drop_stale()
        return subject

    def _drop_stale(self) -> None:
        """Drop heap entries at the top that were replaced or removed."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
