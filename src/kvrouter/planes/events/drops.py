"""Batches that were dropped, told together: the first at once, the others once a minute."""

import asyncio

from kvrouter.planes.events.port import DropSink

TELL_EVERY_S = 60.0


class Drops:
    """Counts what was dropped, and tells ``tell`` how many and why the last was. Use it from one loop."""

    def __init__(self, tell: DropSink, *, every_s: float = TELL_EVERY_S) -> None:
        self._tell = tell
        self._every_s = every_s
        self._n_untold = 0
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, n_batches: int, why: str) -> None:
        """Note that ``n_batches`` were dropped."""
        self._n_untold += n_batches
        self._why = why
        if self._timer is None:
            self._tell_now()

    def close(self) -> None:
        """Tell what was not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._n_untold:
            self._tell(self._n_untold, self._why)
            self._n_untold = 0

    def _tell_now(self) -> None:
        self._tell(self._n_untold, self._why)
        self._n_untold = 0
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._n_untold:
            self._tell_now()
