"""An event loop that knows how long each of its turns took: for so long nothing else could happen."""

import asyncio
import selectors
import time
from typing import NamedTuple


class Turn(NamedTuple):
    """Seconds of the clock, and of the loop's own processor time: the second is less on a busy machine."""

    clock_s: float
    cpu_s: float


class TurnClock(selectors.DefaultSelector):
    """Measures from one wait for events to the next."""

    def __init__(self) -> None:
        super().__init__()
        self._woke = Turn(time.perf_counter(), time.thread_time())
        self._longest = Turn(0.0, 0.0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, between two turns."""
        took = Turn(time.perf_counter() - self._woke.clock_s, time.thread_time() - self._woke.cpu_s)
        self._longest = Turn(*map(max, self._longest, took))
        ready = super().select(timeout)
        self._woke = Turn(time.perf_counter(), time.thread_time())
        return ready

    def take_longest(self) -> Turn:
        """The longest turn since the last call, by each clock for itself."""
        longest, self._longest = self._longest, Turn(0.0, 0.0)
        return longest

    def loop(self) -> asyncio.AbstractEventLoop:
        """An event loop that is measured by this clock."""
        return asyncio.SelectorEventLoop(self)
