"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

For code that uses no socket and no thread: hours pass in a moment, and every run is the same.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec, TypeVar
from unittest.mock import patch

RUNS_FOR_S = 1e5
"""A machine has run for a while when a program starts: nothing began at 0."""

P = ParamSpec("P")
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

    def block(self, seconds: float) -> None:
        """Let time pass in which nothing else runs."""
        self._clock.passed_s += seconds


def run_in_virtual_time(work: Coroutine[None, None, T]) -> T:
    """Run ``work`` to its end; what it left running is cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test in virtual time; ``time.monotonic()`` is the loop's, and ``time.sleep`` blocks the loop."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            loop.block(RUNS_FOR_S)
            with patch("time.monotonic", loop.time), patch("time.sleep", loop.block):
                runner.run(test(*arguments, **named))

    return run
