"""The legs that run on a worker, counted, so that a drain knows when the last one has ended."""

import asyncio

from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.port import EngineStream


class RunningLegs:
    """How many legs run, and a way to wait until none does."""

    def __init__(self) -> None:
        self.n = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def follow(self, stream: EngineStream) -> "FollowedStream":
        """Count ``stream`` until its last chunk, its failure, or its cancellation."""
        self.n += 1
        self._idle.clear()
        return FollowedStream(stream, self)

    def ended(self) -> None:
        """One leg has ended."""
        self.n -= 1
        if self.n == 0:
            self._idle.set()

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, or ``limit_s`` seconds; return whether none does."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class FollowedStream:
    """A leg's stream; it ends once, however that comes."""

    __slots__ = ("_inner", "_legs")

    def __init__(self, inner: EngineStream, legs: RunningLegs) -> None:
        self._inner = inner
        self._legs: RunningLegs | None = legs

    def __aiter__(self) -> "FollowedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        try:
            chunk = await self._inner.__anext__()
        except asyncio.CancelledError:
            raise  # the reader may read on; one that does not cancels the leg
        except BaseException:
            self._end()
            raise
        if chunk.finish is not None:
            self._end()
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop; idempotent."""
        self._inner.cancel(reason)
        self._end()

    def _end(self) -> None:
        legs, self._legs = self._legs, None
        if legs is not None:
            legs.ended()
