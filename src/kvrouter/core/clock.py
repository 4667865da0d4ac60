"""Clocks: one that stops while the event loop is blocked, the last change of a value, and due times."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)

_STALE_MIN = 64
"""So many moments that were put off or dropped are kept in any case."""


LATE_TICKS = 2
"""A tick that takes longer than so many was one in which the loop stood still."""


class AwakeClock:
    """A clock that stops while its loop does. It advances by ticks, of about ``every_s`` seconds.

    When a loop was held up for long, what its peers said meanwhile is not read yet when its timers go off: by
    a common clock all of them would seem to be dead.
    """

    __slots__ = ("every_s", "now_s")

    def __init__(self, every_s: float) -> None:
        self.now_s = 0.0
        self.every_s = every_s

    def advance(self, elapsed_s: float) -> bool:
        """Count a tick that took ``elapsed_s`` seconds; return whether the loop stood still in it.

        Such a tick counts as one: a peer that was asked in the tick before has another one to answer.
        """
        stood_still = elapsed_s > LATE_TICKS * self.every_s
        self.now_s += self.every_s if stood_still else elapsed_s
        return stood_still


class LastChange:
    """When a value was last seen to change, in seconds of its reader's own clock.

    A claim in a store lives while its value changes: clocks of other hosts are never compared.
    """

    __slots__ = ("_value", "at_s")

    def __init__(self) -> None:
        self._value: object = _NOTHING
        self.at_s = -inf

    def see(self, value: object, now_s: float) -> None:
        """The store holds ``value`` now."""
        if value != self._value:
            self._value, self.at_s = value, now_s

    def is_within(self, lease_s: float, now_s: float) -> bool:
        """Whether it changed less than ``lease_s`` seconds ago."""
        return now_s < self.at_s + lease_s


_NOTHING = object()


class DueTimes(Generic[Subject]):
    """One moment for each subject, in seconds on any clock. Memory: a few entries for each that waits."""

    def __init__(self) -> None:
        self._due_s: dict[Subject, float] = {}
        self._heap: list[tuple[float, int, Subject]] = []
        self._number = 0

    def __len__(self) -> int:
        """How many moments are kept, with those that were put off."""
        return len(self._heap)

    @property
    def waiting(self) -> int:
        """How many subjects wait."""
        return len(self._due_s)

    def due_s(self, subject: Subject) -> float:
        """When it is due; ``inf`` when it does not wait."""
        return self._due_s.get(subject, inf)

    @property
    def next_s(self) -> float:
        """Before this nothing is due; ``inf`` when nothing waits."""
        return self._heap[0][0] if self._heap else inf

    def put(self, subject: Subject, due_s: float) -> None:
        """It is due then, and no longer when it was due before."""
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
        """It is not due any more."""
        self._due_s.pop(subject, None)

    def take(self, now_s: float) -> list[Subject]:
        """Return what is due by now, the first first; it is no longer due."""
        taken = []
        while (subject := self.take_first(now_s)) is not None:
            taken.append(subject)
        return taken

    def take_first(self, now_s: float) -> Subject | None:
        """Return what is due by now and was due first, which is no longer due; None when nothing is."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now_s:
            return None
        _, _, subject = heappop(self._heap)
        del self._due_s[subject]
        self._drop_stale()
        return subject

    def _drop_stale(self) -> None:
        """A moment that was put off, or dropped, is left behind in the heap."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
