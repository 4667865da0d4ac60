"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

For code that uses no socket and no thread: hours pass in a moment, and every run is the same.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Passes on how long the loop would wait, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the test waits for what never comes"
            self.passed_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` begins at 0 and counts only what timers waited for."""

    def __init__(self) -> None:
        self._clock = _NoWaiting()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed_s


def run_in_virtual_time(work: Coroutine[None, None, T]) -> T:
    """Run ``work`` to its end; what it left running is cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
