"""The HTTP server on a real socket, on either event loop, and what it counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import uvloop

from kvrouter.frontend.http import (
    SSE_DONE,
    SSE_FILLER,
    Disconnect,
    Handler,
    HttpEvent,
    HttpServer,
    Limits,
    Request,
    Responder,
    Stream,
    sse_event,
)
from tests.testing.waits import LIMIT_S

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
QUICK = Limits(sweep_s=0.02, probe_s=0.02, linger_s=0.2, handler_grace_s=0.1)

Run = Callable[[Coroutine[object, object, None]], None]

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def runner(loop: str) -> Run:
    """Run a scenario to its end on this event loop."""

    def run_with_limit(scenario: Coroutine[object, object, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await scenario

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(limited())

    return run_with_limit


@dataclass
class RunningServer:
    server: HttpServer
    counts: Counter[HttpEvent] = field(default_factory=Counter)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is closed at the end, if the test does not close it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def exchange(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=60.0)


@asynccontextmanager
async def running_server(handler: Handler, limits: Limits = QUICK) -> AsyncIterator[RunningServer]:
    counts: Counter[HttpEvent] = Counter()

    def observe(event: HttpEvent) -> None:
        counts[event] += 1

    server = HttpServer(handler, limits, observer=observe)
    await server.serve("127.0.0.1", 0)
    served = RunningServer(server, counts)
    try:
        yield served
    finally:
        await server.drain(0)
        for writer in served.writers:
            writer.close()
        assert server.connections == 0
        assert server.running == 0
        assert (
            counts[HttpEvent.CONNECTION_OPENED] + counts[HttpEvent.CONNECTION_REFUSED]
            == (counts[HttpEvent.CONNECTION_CLOSED])
        )


async def echo(request: Request, responder: Responder) -> None:
    answer = f"{request.method} {request.path} {request.query} ".encode() + request.body
    await responder.send(200, [(b"content-type", b"text/plain")], answer)


async def three_events(request: Request, responder: Responder) -> None:
    stream = responder.start_stream(200, [(b"content-type", b"text/event-stream")])
    for number in (b"1", b"2", b"3"):
        stream.write(sse_event(number))
        await asyncio.sleep(0)
    stream.write(SSE_DONE)
    stream.end()


@dataclass
class RecordingServerEvents:
    """What a handler learned of its client."""

    reasons: list[Disconnect] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[Stream] = field(default_factory=list)

    async def endless(self, request: Request, responder: Responder) -> None:
        """Tokens for as long as somebody reads."""
        responder.on_disconnect(self.reasons.append)
        stream = responder.start_stream(200, filler=SSE_FILLER)
        self.streams.append(stream)
        while responder.disconnected is None:
            stream.write(sse_event(b"token"))
            self.began.set()
            await asyncio.sleep(0.001)
        stream.write(b"into the void")

    async def silent(self, request: Request, responder: Responder) -> None:
        """A long prefill: nothing is written before the client goes."""
        self.began.set()
        gone = asyncio.Event()
        responder.on_disconnect(self.reasons.append)
        responder.on_disconnect(lambda _: gone.set())
        await gone.wait()

    async def silent_stream(self, request: Request, responder: Responder) -> None:
        """A stream whose first token is far away."""
        responder.start_stream(200, filler=SSE_FILLER)
        await self.silent(request, responder)
