"""A request plane whose streams do what a test tells them."""

import asyncio
from collections import deque
from collections.abc import Callable

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.transports.requests.port import (
    AliveSink,
    StreamBroken,
    TokenSink,
    WorkerFull,
    WorkerUnreachable,
)

Step = EngineChunk | Exception


class ScriptedStream:
    """A stream that a test feeds; it remembers why it was cancelled."""

    def __init__(self, request: EngineRequest, address: str) -> None:
        self.request = request
        self.address = address
        self.cancelled_for: str | None = None
        self.is_accepted = True
        self._steps: deque[Step] = deque()
        self._more = asyncio.Event()
        self._ended = False

    @classmethod
    def refused(cls, request: EngineRequest, address: str, error: Exception) -> "ScriptedStream":
        """The stream of a leg that its worker does not accept."""
        stream = cls(request, address)
        stream.is_accepted = False
        stream.feed(error)
        return stream

    async def accepted(self) -> None:
        if not self.is_accepted:
            await self.__anext__()

    async def hand_over(self, sink: TokenSink) -> None:
        """Tokens are only read."""

    def feed(self, *steps: Step) -> None:
        self._steps.extend(steps)
        self._more.set()

    def tokens(self, *token_ids: int, finish: FinishReason | None = None, cached: int | None = None) -> None:
        self.feed(EngineChunk(token_ids=token_ids, finish=finish, cached_tokens=cached))

    def die(self) -> None:
        self.feed(StreamBroken(f"{self.address} died"))

    def __aiter__(self) -> "ScriptedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._ended:
            raise StopAsyncIteration
        while not self._steps:
            self._more.clear()
            await self._more.wait()
        step = self._steps.popleft()
        if isinstance(step, Exception):
            self._ended = True
            raise step
        self._ended = step.finish is not None
        return step

    def cancel(self, reason: str) -> None:
        if self.cancelled_for is None:
            self.cancelled_for = reason
            if not self._ended:
                self.feed(EngineChunk(finish=FinishReason.CANCELLED))


def silent(stream: ScriptedStream) -> None:
    """A worker that accepts and says nothing by itself."""


class ScriptedTransport:
    """Opens scripted streams; ``script`` is called with each one. ``full`` addresses refuse.

    Where ``accepts`` is cleared, nothing can be sent yet.
    """

    def __init__(self, script: Callable[[ScriptedStream], None] | None = None) -> None:
        self.asked: list[str] = []
        self.opened: list[ScriptedStream] = []
        self.unreachable: set[str] = set()
        self.full: set[str] = set()
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.script = script
        self.followers: dict[str, AliveSink] = {}
        self._waiters: list[asyncio.Event] = []

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        self.followers[address] = on_alive

        def end() -> None:
            self.followers.pop(address, None)

        return end

    def open_now(self, address: str, request: EngineRequest) -> ScriptedStream | None:
        """The router waits for :meth:`open`."""

    async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
        await asyncio.sleep(0)
        self.asked.append(address)
        await self.accepts.wait()
        if address in self.full:
            return ScriptedStream.refused(request, address, WorkerFull(f"{address}: its queue is full"))
        if address in self.unreachable:
            raise WorkerUnreachable(f"{address} refuses")
        stream = ScriptedStream(request, address)
        self.opened.append(stream)
        if self.script is not None:
            self.script(stream)
        for waiter in self._waiters:
            waiter.set()
        return stream

    async def close(self) -> None:
        for stream in self.opened:
            stream.die()

    async def wait_for(self, leg: Leg, *, nth: int = 0) -> ScriptedStream:
        """Return the ``nth`` stream of ``leg`` once it was opened."""
        while True:
            found = [stream for stream in self.opened if stream.request.leg is leg]
            if len(found) > nth:
                return found[nth]
            event = asyncio.Event()
            self._waiters.append(event)
            await event.wait()

    def legs(self) -> list[tuple[Leg, str]]:
        return [(stream.request.leg, stream.address) for stream in self.opened]


def address_of(worker_id: int) -> str:
    return f"scripted://{WorkerId(worker_id)}"
