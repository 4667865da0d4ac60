"""The worker's end of one leg over tcp: what the engine brings goes on as far as there is credit."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.tcp.frames import Kind, credit_of, encode_number, encode_refused
from kvrouter.planes.requests.wire import is_bare


class AnswerSink(Protocol):
    """The connection, as an answer sees it."""

    is_choked: bool
    """Whether more bytes wait for the router than should."""

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame with the others of this turn."""

    def bring_tokens(self, stream_id: int, token_ids: tuple[int, ...]) -> None:
        """Send bare tokens with the others of this turn."""

    def bring(self, stream_id: int, chunk: EngineChunk) -> None:
        """Send a chunk with the others of this turn; raise ProtocolError for what cannot travel."""


class TcpAnswer:
    """What one leg answers: chunks that are cut to the credit its router gave."""

    __slots__ = ("_credit_tokens", "_is_accepted", "_more", "_sink", "stream_id", "task")

    def __init__(self, sink: AnswerSink, stream_id: int, credit_tokens: int) -> None:
        self.stream_id = stream_id
        self.task: asyncio.Task[None] | None = None
        self._sink = sink
        self._credit_tokens = credit_tokens
        self._is_accepted = False
        self._more: asyncio.Future[None] | None = None

    def add_credit(self, tokens: int) -> None:
        """The router takes ``tokens`` more."""
        self._credit_tokens += tokens
        self.go_on()

    def go_on(self) -> None:
        """There is credit, or room to write."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def accept(self) -> None:
        """Say so."""
        self._is_accepted = True
        self._sink.send(Kind.ACCEPTED, encode_number(self.stream_id))

    def take(self, chunk: EngineChunk) -> bool:
        """Send bare tokens, if there is credit for all of them and room to write: what most chunks are."""
        if not is_bare(chunk):
            return False
        n_tokens = len(chunk.token_ids) or 1
        if n_tokens > self._credit_tokens or self._sink.is_choked:
            return False
        self._credit_tokens -= n_tokens
        self._sink.bring_tokens(self.stream_id, chunk.token_ids)
        return True

    async def send(self, chunk: EngineChunk) -> None:
        """Send, in parts where there is credit for a part only."""
        self._bring(await self._fitting(chunk))

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send, in parts where there is credit for a part only; the leg is over with the last one."""
        last = await self._fitting(chunk)
        over()
        self._bring(last)

    async def end(self, error: Exception) -> None:
        """Refuse, or say that the leg is lost."""
        kind = Kind.FAILED if self._is_accepted else Kind.REFUSED
        self._sink.send(kind, encode_refused(self.stream_id, error))

    def _bring(self, chunk: EngineChunk) -> None:
        self._credit_tokens -= credit_of(chunk)
        self._sink.bring(self.stream_id, chunk)

    async def _fitting(self, chunk: EngineChunk) -> EngineChunk:
        """Send what ``chunk`` has above the credit as credit comes; return the rest once it may go.

        The first part tells cached tokens, the last an end. An engine's own bytes are no parts.
        """
        while True:
            n_tokens = credit_of(chunk)
            await self._wait_for_room(n_tokens)
            if n_tokens <= self._credit_tokens:
                return chunk
            part = EngineChunk(chunk.token_ids[: self._credit_tokens], cached_tokens=chunk.cached_tokens)
            chunk = replace(chunk, token_ids=chunk.token_ids[self._credit_tokens :], cached_tokens=None)
            self._bring(part)

    async def _wait_for_room(self, n_tokens: int) -> None:
        """Wait until some of ``n_tokens`` may be sent."""
        while self._sink.is_choked or (self._credit_tokens <= 0 and n_tokens > 0):
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None
