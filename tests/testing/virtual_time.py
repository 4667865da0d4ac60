"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

For code that uses no socket and no thread: hours pass in a moment, and every run is the same.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial, wraps
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from kvrouter.router.engine_reports import EngineReports
from kvrouter.router.model_router import ModelRouter

TURN_S = 1e-6

HAVE_A_CLOCK = (ModelRouter, EngineReports)

P = ParamSpec("P")
T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Passes on how long the loop would wait, and does not."""

    def __init__(self, turn_s: float) -> None:
        super().__init__()
        self.passed_s = 0.0
        self._turn_s = turn_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self.passed_s += self._turn_s
        if not ready:
            assert timeout is not None, "the test waits for what never comes"
            self.passed_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` begins at 0 and counts what timers waited for, and ``turn_s`` for each turn of the loop."""

    def __init__(self, *, turn_s: float = 0.0) -> None:
        self._clock = _NoWaiting(turn_s)
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
    """Run a test in virtual time, of which each turn of the loop takes a little. ``time.monotonic()`` is the
    loop's, also where it is a default of :data:`HAVE_A_CLOCK`, and ``time.sleep`` blocks the loop.
    """

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner(loop_factory=partial(VirtualLoop, turn_s=TURN_S)))
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            stack.enter_context(patch("time.monotonic", loop.time))
            stack.enter_context(patch("time.sleep", loop.block))
            for each in HAVE_A_CLOCK:
                stack.enter_context(patch.dict(each.__init__.__kwdefaults__, clock=loop.time))
            runner.run(test(*arguments, **named))

    return run
