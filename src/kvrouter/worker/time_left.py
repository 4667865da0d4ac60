"""A leg whose request's time is up ends at the worker, though no router says so."""

import asyncio

from kvrouter.core.errors import DeadlineExceeded
from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.port import EngineStream

GRACE_S = 1.0
"""How much longer than its request a leg may run: the router ends both, and its word is to come first."""

TIME_LEFT_MAX_S = 7 * 86_400.0
"""No leg runs longer, whatever a router allows."""

REASON = "the time of its request was up"


class TimedStream:
    """The stream of a leg that may run for ``time_left_s`` seconds from now, and ``grace_s`` more.

    Then the engine is told to stop, and the reader gets :class:`DeadlineExceeded`. A leg that ended in time
    is left alone.
    """

    __slots__ = ("_inner", "_is_over_time", "_timer")

    def __init__(self, inner: EngineStream, time_left_s: float, *, grace_s: float = GRACE_S) -> None:
        # What is no number, or below 0, is no time left.
        left_s = min(time_left_s, TIME_LEFT_MAX_S) if time_left_s > 0 else 0.0
        self._inner = inner
        self._is_over_time = False
        self._timer = asyncio.get_running_loop().call_later(left_s + grace_s, self._end)

    def __aiter__(self) -> "TimedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        try:
            chunk = await self._inner.__anext__()
        except Exception:
            self._timer.cancel()
            raise
        if chunk.finish is not None:
            self._timer.cancel()
            if self._is_over_time:
                raise DeadlineExceeded(REASON)
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop and free what it holds; idempotent, allowed at any time."""
        self._timer.cancel()
        self._inner.cancel(reason)

    def _end(self) -> None:
        self._is_over_time = True
        self._inner.cancel(REASON)
