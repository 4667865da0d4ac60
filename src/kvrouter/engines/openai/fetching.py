"""The answer of a leg that fetches KV of its prompt from another engine."""

import asyncio

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss
from kvrouter.engines.openai.server import CallLost
from kvrouter.transports.requests.port import EngineFailed, EngineFailedLater, EngineStream

READ_WITHIN_S = 1.0
"""How long an engine's server may take to read a call. A connection that is closed before that may take its
call with it, unread."""


KV_FAILURES = (EngineFailed, EngineFailedLater, CallLost)


class FetchingStream:
    """The answer of a leg that fetches KV from another engine: a decode leg, or a prefill leg.

    A leg that fails before its first token is taken to have got no KV, the most frequent cause: the engine
    does not report it. The leg is then prefilled again, without blame. ``failures`` are the errors by which
    an engine may report it.

    With ``read_within_s`` only the decode engine can notify the prefill engine that the KV is no longer
    wanted: it does so when it aborts the call, whether it fetched anything or not. For a call that it never
    read it sends no notification, and the KV keeps its blocks until its lease ends. So a cancelled call is
    aborted only after it was surely read; the reader of its answer gets the end at once.
    """

    def __init__(
        self,
        inner: EngineStream,
        failures: tuple[type[KvrouterError], ...] = KV_FAILURES,
        *,
        read_within_s: float | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._inner = inner
        self._failures = failures
        self._loop = loop
        self._read_at_s = loop.time() + (read_within_s or 0.0)
        self._left: asyncio.Future[EngineChunk] | None = (
            None if read_within_s is None else loop.create_future()
        )
        """The end that a reader gets of a call that is taken back later; None once the engine answers."""
        self._has_begun = False
        self._is_over = False

    def __aiter__(self) -> "FetchingStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        try:
            chunk = await (self._inner.__anext__() if self._left is None else self._first(self._left))
        except self._failures as error:
            if self._has_begun:
                raise
            return EngineChunk(
                finish=FinishReason.ERROR,
                error=error.message,
                kv_lost=KvLoss.BROKEN,
                failure=error.answer,
            )
        self._has_begun = self._has_begun or not chunk.is_comment
        return chunk

    async def _first(self, left: asyncio.Future[EngineChunk]) -> EngineChunk:
        """Return the engine's first chunk, or the end where the call is cancelled before."""
        reading = asyncio.ensure_future(self._inner.__anext__())
        try:
            await asyncio.wait({reading, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.cancel() and not reading.cancelled():
                reading.exception()  # where the client left meanwhile, nobody else reads it
        if left.done():
            self._is_over = True
            return left.result()
        chunk = reading.result()
        self._left = None
        return chunk

    def cancel(self, reason: str) -> None:
        """Ask the engine to stop, once it has read the call. Idempotent."""
        if self._left is None:
            self._inner.cancel(reason)
        elif not self._left.done():
            self._left.set_result(EngineChunk(finish=FinishReason.CANCELLED, error=reason))
            self._loop.call_at(max(self._read_at_s, self._loop.time()), self._inner.cancel, reason)
