"""Background tasks whose errors are reported at once, periodic ticks, and one timer for many due times."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from math import inf
from typing import Generic, TypeVar

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


Member = TypeVar("Member", bound=Hashable)

SWEEP_S = 0.1
"""The least time between two sweeps: many due times cost few of them, and a check comes this late at most."""

LATE_S = 0.1
"""A sweep that is this late shows that the process was paused: messages that arrived may not be read yet."""


class DueTimes(Generic[Member]):
    """Checks each member at its due time, with one timer for all. Due times are on the monotonic clock.

    ``check`` is called with the member, the time, and the seconds by which the sweep is late; it returns the
    next due time, or None to remove the member. A due time that moves later needs no call: the check finds
    it, and that is cheaper than a timer for each member.
    """

    def __init__(self, check: Callable[[Member, float, float], float | None]) -> None:
        self._check = check
        self._due_s: dict[Member, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = inf
        self._swept_s = -inf

    def put(self, member: Member, due_s: float) -> None:
        """Add ``member``, or move its due time."""
        self._due_s[member] = due_s
        if due_s < self._next_s:
            self._arm(due_s)

    def drop(self, member: Member) -> None:
        """Remove ``member``. Idempotent."""
        self._due_s.pop(member, None)

    def _arm(self, due_s: float) -> None:
        now_s = time.monotonic()
        next_s = max(now_s, due_s, self._swept_s + SWEEP_S)
        if next_s < self._next_s:
            if self._timer is not None:
                self._timer.cancel()
            self._next_s = next_s
            self._timer = asyncio.get_running_loop().call_later(next_s - now_s, self._run)

    def _run(self) -> None:
        now_s = self._swept_s = time.monotonic()
        late_s = now_s - self._next_s
        self._timer, self._next_s = None, inf
        due = [member for member, due_s in self._due_s.items() if due_s <= now_s]
        for member in sorted(due, key=self._due_s.__getitem__):
            if self._due_s.pop(member, None) is None:
                continue  # an earlier check dropped it
            try:
                next_s = self._check(member, now_s, late_s)
            except Exception as error:  # noqa: BLE001 - the other members are checked all the same
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a check at a due time failed", "exception": error}
                )
                continue
            if next_s is not None:
                self._due_s[member] = next_s
        if self._due_s:
            self._arm(min(self._due_s.values()))
