"""The router's end of one leg, whatever wire it came over: what waits to be read, and how the leg ends."""

import asyncio
from collections import deque
from collections.abc import Callable

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import EngineChunk, FinishReason, merge_chunks
from kvrouter.planes.requests.port import StreamBroken


class LegStream:
    """One open leg, as its wire fills it and its reader empties it.

    Its wire calls :meth:`push` and :meth:`fail`, and gives two functions: ``on_read`` hears how many tokens
    the reader took, ``on_cancel`` tells the worker to stop. A chunk without tokens counts as one token.
    """

    def __init__(self, *, on_read: Callable[[int], None], on_cancel: Callable[[str], None]) -> None:
        self.waiting_tokens = 0
        self._on_read = on_read
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[EngineChunk] = deque()
        self._waits_since_s = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._failure: KvrouterError | None = None
        self._cancelled = False
        self._complete = False

    @property
    def is_over(self) -> bool:
        """True once nothing more is expected of the wire: the last chunk came, it failed or was cancelled."""
        return self._complete or self._failure is not None or self._cancelled

    @property
    def unread_for_s(self) -> float:
        """How long chunks have waited without any being read; 0 when none waits."""
        return self._loop.time() - self._waits_since_s if self._chunks else 0.0

    def push(self, chunk: EngineChunk) -> None:
        """The worker sent more. Nothing counts after the end."""
        if self.is_over:
            return
        if not self._chunks:
            self._waits_since_s = self._loop.time()
        self._chunks.append(chunk)
        self.waiting_tokens += len(chunk.token_ids) or 1
        self._complete = chunk.finish is not None
        self._wake()

    def fail(self, error: KvrouterError) -> None:
        """The leg is lost: the reader gets what came before, then ``error``. Nothing counts after the end."""
        if not self.is_over:
            self._failure = error
            self._wake()

    def break_off(self, why: str) -> None:
        """The worker is lost: the reader gets what came before, then StreamBroken."""
        self.fail(StreamBroken(why))

    def __aiter__(self) -> "LegStream":
        return self

    async def __anext__(self) -> EngineChunk:
        while not self._chunks:
            if self._failure is not None:
                raise type(self._failure)(self._failure.message, param=self._failure.param)
            if self.is_over:
                raise StopAsyncIteration
            await self._wait()
        chunk = self._chunks[0] if len(self._chunks) == 1 else merge_chunks(self._chunks)
        self._chunks.clear()
        read_tokens, self.waiting_tokens = self.waiting_tokens, 0
        self._on_read(read_tokens)
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the worker to stop and free what it holds; idempotent, allowed at any time."""
        if self._cancelled or self._failure is not None:
            return
        self._cancelled = True
        if self._chunks or not self._complete:
            self._chunks.clear()
            self._chunks.append(EngineChunk(finish=FinishReason.CANCELLED))
            self._wake()
        self._on_cancel(reason)

    async def _wait(self) -> None:
        if self._reader is not None:
            raise RuntimeError("a stream has one reader")
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
