"""A call that its engine reads, even where its client leaves at once."""

import asyncio

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.planes.requests.port import EngineStream

READ_WITHIN_S = 1.0
"""How long an engine's server may take to read a call. A connection that is closed before that may take its
call with it, unread."""


class ArrivingStream:
    """The answer of a decode leg that comes for KV which waits at a prefill engine.

    Only the decode engine can tell the prefill engine that nobody comes any more: it does so when it aborts
    the call, with or without having fetched anything. Of a call that it never read it tells nobody, and the
    KV keeps its blocks until its lease ends. So a call that is cancelled is taken back once it was surely
    read; whoever reads its answer gets the end at once.
    """

    def __init__(self, inner: EngineStream, *, read_within_s: float = READ_WITHIN_S) -> None:
        loop = asyncio.get_running_loop()
        self._inner = inner
        self._loop = loop
        self._read_at_s = loop.time() + read_within_s
        self._left: asyncio.Future[EngineChunk] = loop.create_future()
        self._has_begun = False
        self._is_over = False

    def __aiter__(self) -> "ArrivingStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        if self._has_begun:
            return await self._inner.__anext__()
        reading = asyncio.ensure_future(self._inner.__anext__())
        try:
            await asyncio.wait({reading, self._left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.cancel() and not reading.cancelled():
                reading.exception()  # where the client left meanwhile, nobody else looks at it
        if self._left.done():
            self._is_over = True
            return self._left.result()
        chunk = reading.result()
        self._has_begun = True
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop, once it knows of the call. Idempotent."""
        if self._has_begun:
            self._inner.cancel(reason)
        elif not self._left.done():
            self._left.set_result(EngineChunk(finish=FinishReason.CANCELLED, error=reason))
            self._loop.call_at(max(self._read_at_s, self._loop.time()), self._inner.cancel, reason)
