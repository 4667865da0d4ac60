"""An engine that ticks: one token for every open stream at once, and nothing else is simulated."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.text.model import FIRST_WORD_ID, mock_words

N_WORDS = len(mock_words())


class TickingEngine:
    """Takes every leg. A tick every ``tick_s`` brings each open stream its next token."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._streams: set[TickingStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def submit(self, request: EngineRequest) -> "TickingStream":
        """A leg begins; its first token is there at once."""
        loop = asyncio.get_running_loop()
        stream = TickingStream(self._streams, request.sampling.max_tokens, loop)
        if self._timer is None:
            self._timer = loop.call_at(loop.time() + self._tick_s, self._tick)
        return stream

    def _tick(self) -> None:
        for stream in tuple(self._streams):
            stream.bring()
        self._timer = None
        if self._streams:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + self._tick_s, self._tick)


class TickingStream:
    """One answer of ``max_tokens`` words."""

    def __init__(
        self, open_streams: "set[TickingStream]", max_tokens: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._open_streams = open_streams
        self._loop = loop
        self._left = max_tokens
        self._chunks: deque[EngineChunk] = deque()
        self._reader: asyncio.Future[None] | None = None
        open_streams.add(self)
        self.bring()

    def __aiter__(self) -> AsyncIterator[EngineChunk]:
        return self

    async def __anext__(self) -> EngineChunk:
        while not self._chunks:
            self._reader = self._loop.create_future()
            await self._reader
        return self._chunks.popleft()

    def cancel(self, reason: str) -> None:
        """The leg ends; its reader hears of it."""
        self._open_streams.discard(self)
        self._chunks.append(EngineChunk(finish=FinishReason.CANCELLED, error=reason))
        self._wake()

    def bring(self) -> None:
        """The next token is here."""
        self._left -= 1
        finish = None
        if self._left <= 0:
            finish = FinishReason.LENGTH
            self._open_streams.discard(self)
        self._chunks.append(EngineChunk((FIRST_WORD_ID + self._left % N_WORDS,), finish))
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
