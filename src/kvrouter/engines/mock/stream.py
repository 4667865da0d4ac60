"""The answer to one leg at a mock engine, as its reader sees it."""

import asyncio
from collections.abc import Callable

from kvrouter.core.requests import EngineChunk, merge_chunks
from kvrouter.planes.requests.port import StreamBroken


class MockStream:
    """The answer to one leg. ``on_credit`` is told how many tokens were read, ``on_cancel`` why to end.

    Thousands of prefill legs that have ended are kept, to be cancelled: an empty one is small.
    """

    __slots__ = (
        "_broken",
        "_chunks",
        "_ended",
        "_on_cancel",
        "_on_credit",
        "_read_tokens",
        "_reader",
        "_refill_tokens",
    )

    def __init__(
        self, *, tokens_max: int, on_credit: Callable[[int], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._on_credit = on_credit
        self._on_cancel = on_cancel
        self._refill_tokens = max(1, tokens_max // 2)
        self._chunks: list[EngineChunk] = []
        self._read_tokens = 0
        self._ended = False
        self._broken: str | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> "MockStream":
        return self

    async def __anext__(self) -> EngineChunk:
        while not self._chunks:
            if self._broken is not None:
                raise StreamBroken(self._broken)
            if self._ended:
                raise StopAsyncIteration
            if self._reader is not None:
                raise RuntimeError("a stream has one reader")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        chunk = self._chunks[0] if len(self._chunks) == 1 else merge_chunks(self._chunks)
        self._chunks.clear()
        self._read_tokens += len(chunk.token_ids)
        if self._read_tokens >= self._refill_tokens and not self._ended:
            self._on_credit(self._read_tokens)
            self._read_tokens = 0
        return chunk

    def cancel(self, reason: str) -> None:
        """End the leg; a prefill leg that has ended gives up its KV unless a decode leg came for it."""
        if self._broken is None:
            self._on_cancel(reason)

    def push(self, chunk: EngineChunk) -> None:
        """The engine generated more."""
        self._chunks.append(chunk)
        self._ended = self._ended or chunk.finish is not None
        self._wake()

    def break_off(self, why: str) -> None:
        """The engine is gone; what it generated before is still read."""
        if not self._ended and self._broken is None:
            self._broken = why
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
