"""A streamed answer whose head has not come yet."""

import asyncio
from collections.abc import Coroutine

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.planes.requests.port import EngineStream


class OpeningStream:
    """An :class:`EngineStream` from the moment that its call is sent.

    Engines may send the head of a stream with its first token, after their whole queue: the router waits less
    for the word that a leg was accepted. What the engine refuses is raised by the read.
    """

    def __init__(self, opening: Coroutine[None, None, EngineStream]) -> None:
        self._opening = asyncio.create_task(opening)
        self._cancelled: str | None = None
        self._is_over = False

    def __aiter__(self) -> "OpeningStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        if not self._opening.done():
            await asyncio.wait({self._opening})
        if self._opening.cancelled():
            self._is_over = True
            return EngineChunk(finish=FinishReason.CANCELLED, error=self._cancelled)
        if self._opening.exception() is not None:
            self._is_over = True
        return await self._opening.result().__anext__()

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop. Idempotent."""
        if self._cancelled is not None:
            return
        self._cancelled = reason
        if not self._opening.cancel() and not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().cancel(reason)
