"""Which objects are to be looked at, and when: one entry for each, later ones for those that failed."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

FIRST_RETRY_S = 0.5
RETRY_MAX_S = 300.0
ENTRIES_MAX = 10_000

K = TypeVar("K", bound=Hashable)


class Backlog(Generic[K]):
    """Keys that are due at a time in seconds, of any clock that never goes back.

    A key that is added while it is worked on is due again once that is done, so nobody works on one key twice
    at a time, and no change is missed. A failed one comes again after half a second, and after twice as long
    each time it fails anew, up to five minutes. When ``entries_max`` keys wait, one more is not taken; the
    next look at everything brings it again.
    """

    def __init__(self, *, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._due_s: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._added = 0
        self._working: dict[K, float | None] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: K, due_s: float) -> bool:
        """Have ``key`` looked at from ``due_s`` on, or earlier if it was; return False when it is full."""
        if key in self._working:
            again_s = self._working[key]
            self._working[key] = due_s if again_s is None else min(again_s, due_s)
            return True
        if due_s >= self._due_s.get(key, float("inf")):
            return True
        if key not in self._due_s and len(self._due_s) >= self._entries_max:
            return False
        self._due_s[key] = due_s
        self._added += 1
        heapq.heappush(self._heap, (due_s, self._added, key))
        return True

    def take(self, now_s: float) -> K | None:
        """Return a key that is due, to work on until :meth:`done` or :meth:`failed`; None when none is."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now_s:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due_s[key]
        self._working[key] = None
        return key

    def done(self, key: K) -> None:
        """It was looked at, and all is well."""
        self._failures.pop(key, None)
        self._put_back(key, None)

    def failed(self, key: K, now_s: float) -> float:
        """It was looked at in vain; return in how many seconds it is looked at again."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = min(FIRST_RETRY_S * 2.0 ** min(failures, 32), RETRY_MAX_S)
        self._put_back(key, now_s + delay_s)
        return delay_s

    def next_due_s(self) -> float | None:
        """Return when the next key is due; None when none waits."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def _put_back(self, key: K, due_s: float | None) -> None:
        again_s = self._working.pop(key)
        for at_s in (due_s, again_s):
            if at_s is not None:
                self.add(key, at_s)

    def _drop_stale(self) -> None:
        """An entry that was brought forward leaves its old one behind."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
