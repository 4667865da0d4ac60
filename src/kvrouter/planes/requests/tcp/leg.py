"""The worker's end of one leg: a task that passes on what the engine brings, as far as there is credit."""

import asyncio
from typing import Protocol

from msgspec.structs import replace

from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.planes.requests.legs import key_of
from kvrouter.planes.requests.port import EngineStream, RequestServer, StreamBroken


def cancel_soon(inner: EngineStream, reason: str) -> None:
    """Tell an engine to stop, in a turn of its own: a mistake there is shown, and hinders no other leg."""
    asyncio.get_running_loop().call_soon(inner.cancel, reason)


class LegSink(Protocol):
    """The connection, as a leg sees it."""

    @property
    def is_choked(self) -> bool:
        """Whether more bytes wait for the router than should."""

    def leg_accepted(self, leg: "WorkerLeg") -> None:
        """The worker took the leg."""

    def leg_brings(self, leg: "WorkerLeg", chunk: EngineChunk) -> None:
        """The engine brought more, within the credit; raise ProtocolError for what cannot travel."""

    def leg_failed(self, leg: "WorkerLeg", error: Exception) -> None:
        """The worker refused the leg, or failed it; it is over."""


class WorkerLeg:
    """One leg that runs here, from the request to its last chunk, a failure or a cancellation."""

    __slots__ = ("_credit_tokens", "_more", "_sink", "_task", "inner", "key", "request", "stream_id")

    def __init__(self, sink: LegSink, stream_id: int, credit_tokens: int, request: EngineRequest) -> None:
        self.stream_id = stream_id
        self.request = request
        self.key = key_of(request)
        self.inner: EngineStream | None = None
        self._sink = sink
        self._credit_tokens = credit_tokens
        self._more: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, server: RequestServer) -> None:
        """Hand the request to the worker and pass on what it answers."""
        self._task = asyncio.get_running_loop().create_task(self._run(server))
        self._task.add_done_callback(self._done)

    def add_credit(self, tokens: int) -> None:
        """The router takes ``tokens`` more."""
        self._credit_tokens += tokens
        self.go_on()

    def go_on(self) -> None:
        """There is credit, or room to write."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def cancel(self, reason: str) -> None:
        """Stop the engine and pass on nothing more, whether or not the worker has taken the leg yet."""
        if self._task is not None:
            self._task.cancel()
        if self.inner is not None:
            cancel_soon(self.inner, reason)

    async def _run(self, server: RequestServer) -> None:
        inner = self.inner = await server.submit(self.request)
        self._sink.leg_accepted(self)
        async for chunk in inner:
            if len(chunk.token_ids) <= self._credit_tokens and not self._sink.is_choked:
                self._credit_tokens -= len(chunk.token_ids)
                self._sink.leg_brings(self, chunk)
            else:
                await self._bring_in_parts(chunk)
            if chunk.finish is not None:
                return
        raise StreamBroken("the worker's stream ended without a last chunk")

    async def _bring_in_parts(self, chunk: EngineChunk) -> None:
        """Pass on ``chunk`` as credit comes: its first part tells cached tokens, its last an end."""
        while True:
            await self._wait_for_room(is_bare=not chunk.token_ids)
            if len(chunk.token_ids) <= self._credit_tokens:
                self._credit_tokens -= len(chunk.token_ids)
                self._sink.leg_brings(self, chunk)
                return
            part = EngineChunk(chunk.token_ids[: self._credit_tokens], cached_tokens=chunk.cached_tokens)
            chunk = replace(chunk, token_ids=chunk.token_ids[self._credit_tokens :], cached_tokens=None)
            self._credit_tokens = 0
            self._sink.leg_brings(self, part)

    async def _wait_for_room(self, *, is_bare: bool) -> None:
        while self._sink.is_choked or (self._credit_tokens <= 0 and not is_bare):
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._sink.leg_failed(self, error)
