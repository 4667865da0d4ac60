"""Background tasks whose errors are reported at once, and periodic ticks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from kvrouter.core.clock import AwakeClock


def spawn(work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
    """Start ``work`` as a task that the caller keeps; the event loop's exception handler gets its exception.

    asyncio reports the exception of a task that is referenced only when the task is collected: a heartbeat
    that stopped would be found by its absence.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report_mistake)
    return task


def _report_mistake(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_name()}: ended by a mistake", "exception": error, "task": task}
        )


@asynccontextmanager
async def running(work: Coroutine[None, None, None], *, name: str) -> AsyncIterator[None]:
    """Run ``work`` during the context; cancel it at the end."""
    task = spawn(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def tick(clock: AwakeClock) -> None:
    """Wait for the clock's next tick."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.sleep(clock.every_s)
    clock.advance(loop.time() - began_s)


TICK_S = 0.05
"""How often the loop is checked for pauses."""

PAUSE_S = 0.01
"""A tick that is this late counts as a pause: garbage collection, an overloaded host, a stopped process."""


class LoopPauses:
    """Calls ``on_pause`` with the seconds for which the event loop stood still, as soon as it runs again."""

    def __init__(self, on_pause: Callable[[float], None], *, tick_s: float = TICK_S) -> None:
        self._on_pause = on_pause
        self._tick_s = tick_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop; idempotent."""
        if self._timer is None:
            self._await_tick(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + self._tick_s
        self._timer = loop.call_at(due_s, self._tick, loop, due_s)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        late_s = loop.time() - due_s
        self._await_tick(loop)
        if late_s >= PAUSE_S:
            self._on_pause(late_s)
