"""A workqueue: the keys that are due, and the backoff of failed ones."""

from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

from kvrouter.core.backoff import Backoff
from kvrouter.core.clock import DueTimes

FIRST_RETRY_S = 0.5
RETRY_MAX_S = 300.0
BACKOFF = Backoff(FIRST_RETRY_S, RETRY_MAX_S)
ENTRIES_MAX = 10_000

K = TypeVar("K", bound=Hashable)


class Workqueue(Generic[K]):
    """Keys that are due at a time in seconds, of any monotonic clock.

    A key that is added while it is worked on is due again once that ends: a key is worked on once at a time,
    and no change is missed. A failed key comes again after half a second, and after twice as long with each
    failure, up to five minutes. When ``entries_max`` keys wait, a further one is not taken; the next
    reconcile of everything brings it again.
    """

    def __init__(self, *, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._due = DueTimes[K]()
        self._working: dict[K, float | None] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        return self._due.waiting

    def add(self, key: K, due_s: float) -> bool:
        """Make ``key`` due at ``due_s``, or earlier if it was; return False if the queue is full."""
        if key in self._working:
            again_s = self._working[key]
            self._working[key] = due_s if again_s is None else min(again_s, due_s)
            return True
        at_s = self._due.due_s(key)
        if due_s >= at_s:
            return True
        if at_s == inf and self._due.waiting >= self._entries_max:
            return False
        self._due.put(key, due_s)
        return True

    def take(self, now_s: float) -> K | None:
        """Return a due key, to work on until :meth:`done` or :meth:`failed`; None if no key is due."""
        key = self._due.take_first(now_s)
        if key is not None:
            self._working[key] = None
        return key

    def done(self, key: K) -> None:
        """The reconcile of ``key`` ended without an error."""
        self._failures.pop(key, None)
        self._put_back(key, None)

    def failed(self, key: K, now_s: float) -> float:
        """The reconcile of ``key`` failed; return in how many seconds it is due again."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = BACKOFF.delay_s(failures + 1)
        self._put_back(key, now_s + delay_s)
        return delay_s

    def next_due_s(self) -> float | None:
        """Return a moment before which no key is due; None if no key waits."""
        return self._due.next_s if self._due.waiting else None

    def _put_back(self, key: K, due_s: float | None) -> None:
        again_s = self._working.pop(key)
        for at_s in (due_s, again_s):
            if at_s is not None:
                self.add(key, at_s)
