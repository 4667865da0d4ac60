"""Pauses of the event loop: what this process times meanwhile seems to take longer than it does."""

import asyncio
from collections.abc import Callable

TICK_S = 0.05
"""How often the loop is asked for a sign of life."""

PAUSE_S = 0.01
"""A tick that comes so much too late is a pause: a collection of garbage, a starved machine, a stopped
process.
"""


class LoopPauses:
    """Calls ``on_pause`` with the seconds that the loop stood still, as soon as it runs again."""

    def __init__(self, on_pause: Callable[[float], None], *, tick_s: float = TICK_S) -> None:
        self._on_pause = on_pause
        self._tick_s = tick_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on the running loop; idempotent."""
        if self._timer is None:
            self._await_tick(asyncio.get_running_loop())

    def stop(self) -> None:
        """End; idempotent."""
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
