"""The server on real sockets, on both event loops: order, streams, back-pressure, leaving, draining."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import uvloop

from kvrouter.frontend.http import (
    SSE_DONE,
    SSE_FILLER,
    Disconnect,
    Disconnected,
    Handler,
    HttpEvent,
    HttpServer,
    Limits,
    Request,
    Responder,
    Stream,
    sse_event,
)
from kvrouter.telemetry.logs import JsonFormatter
from tests.support.waits import until

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
QUICK = Limits(sweep_s=0.02, probe_s=0.02, linger_s=0.2, handler_grace_s=0.1)

Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_with_limit(scenario: Coroutine[object, object, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(10):
                await scenario

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())

    return run_with_limit


@dataclass
class Served:
    server: HttpServer
    counts: Counter[HttpEvent] = field(default_factory=Counter)

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def exchange(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False)


@asynccontextmanager
async def serving(handler: Handler, limits: Limits = QUICK) -> AsyncIterator[Served]:
    counts: Counter[HttpEvent] = Counter()

    def observe(event: HttpEvent) -> None:
        counts[event] += 1

    server = HttpServer(handler, limits, observer=observe)
    await server.serve("127.0.0.1", 0)
    try:
        yield Served(server, counts)
    finally:
        await server.drain(0)
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
    stream = await responder.start_stream(200, [(b"content-type", b"text/event-stream")])
    for number in (b"1", b"2", b"3"):
        stream.write(sse_event(number))
        await asyncio.sleep(0)
    stream.write(SSE_DONE)
    stream.end()


def test_keep_alive_mixes_answers_and_streams(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await (three_events if request.path == "/stream" else echo)(request, responder)

    async def scenario() -> None:
        async with serving(handler) as served, served.client() as client:
            for _ in range(3):
                assert (await client.post("/p?q=1", content=b"body")).text == "POST /p q=1 body"
                response = await client.post("/stream")
                assert response.headers["transfer-encoding"] == "chunked"
                assert response.headers["date"].endswith("GMT")
                assert response.text == "data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
            assert served.counts[HttpEvent.CONNECTION_OPENED] == 1
            assert served.counts[HttpEvent.REQUEST] == 6

    run(scenario())


def test_pipelined_answers_keep_their_order(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        # The first would be the last to finish, if they ran beside each other.
        await asyncio.sleep(0.05 if request.path == "/0" else 0)
        await responder.send(200, (), request.path.encode())

    async def scenario() -> None:
        async with serving(handler) as served:
            many = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(30))
            received = await served.exchange(
                many + b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            bodies = [part.split(b"\r\n\r\n")[1] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
            assert bodies == [b"/%d" % n for n in range(30)] + [b"/end"]

    run(scenario())


def test_head_has_the_length_and_no_body(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await (three_events if request.path == "/stream" else echo)(request, responder)

    async def scenario() -> None:
        async with serving(handler) as served:
            received = await served.exchange(
                b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\nHEAD /stream HTTP/1.1\r\nHost: x\r\n\r\n" + LAST_GET
            )
            first, second, third, body = received.split(b"\r\n\r\n")
            assert b"content-length: 9" in first
            assert b"transfer-encoding: chunked" in second
            assert b"content-length: 8" in third
            assert body == b"GET /a  "

    run(scenario())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000, 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 200_000, 431),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
    ],
)
def test_a_refused_request_gets_its_reason_behind_what_is_owed(run: Run, data: bytes, status: int) -> None:
    async def scenario() -> None:
        async with serving(echo, Limits(body_bytes=1_000_000, linger_s=1)) as served:
            received = await served.exchange(GET + data)
            owed, refused = received.split(b"HTTP/1.1 ")[1:]
            assert owed.startswith(b"200")
            assert refused.startswith(b"%d " % status)
            assert b"connection: close" in refused
            error = json.loads(refused.split(b"\r\n\r\n")[1])["error"]
            assert error["type"] == "invalid_request_error"
            assert error["code"] == ("request_too_large" if status == 413 else "invalid_request")
            assert served.counts[HttpEvent.BAD_REQUEST] == 1

    run(scenario())


def test_expect_continue(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as served:
            reader, writer = await served.connect()
            head = b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            writer.write(GET + head)
            owed = await reader.readuntil(b"GET /a  ")
            assert owed.startswith(b"HTTP/1.1 200 OK")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK")
            writer.close()

    run(scenario())


def test_http_1_0_gets_a_body_without_chunks(run: Run) -> None:
    async def scenario() -> None:
        async with serving(three_events) as served:
            received = await served.exchange(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head, body = received.split(b"\r\n\r\n", 1)
            assert b"transfer-encoding" not in head
            assert b"keep-alive" not in head
            assert body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"

    run(scenario())


def test_http_1_0_keep_alive(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as served:
            one = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
            received = await served.exchange(one + b"GET /b HTTP/1.0\r\n\r\n")
            first, second = received.split(b"HTTP/1.1 ")[1:]
            assert b"connection: keep-alive" in first
            assert b"connection" not in second

    run(scenario())


def test_tokens_of_one_turn_leave_in_one_chunk(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        stream = await responder.start_stream(200)
        for _ in range(5):
            stream.write(b"ab")
        stream.end()
        stream.end()

    async def scenario() -> None:
        async with serving(handler) as served:
            received = await served.exchange(LAST_GET)
            assert received.split(b"\r\n\r\n", 1)[1] == b"a\r\nababababab\r\n0\r\n\r\n"

    run(scenario())


@dataclass
class Told:
    """What a handler learned of its client."""

    reasons: list[Disconnect] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[Stream] = field(default_factory=list)

    async def endless(self, request: Request, responder: Responder) -> None:
        """Tokens for as long as somebody reads."""
        responder.on_disconnect(self.reasons.append)
        stream = await responder.start_stream(200, filler=SSE_FILLER)
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
        await responder.start_stream(200, filler=SSE_FILLER)
        await self.silent(request, responder)


@pytest.mark.parametrize("kind", ["endless", "silent", "silent_stream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_is_noticed(run: Run, kind: str, how: str) -> None:
    async def scenario() -> None:
        told = Told()
        async with serving(getattr(told, kind)) as served:
            reader, writer = await served.connect()
            writer.write(GET)
            await told.began.wait()
            if kind != "silent":
                await reader.readuntil(b"\r\n\r\n")
            if how == "reset":
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: bool(told.reasons))
            await until(lambda: served.server.running == 0)
            assert told.reasons == [Disconnect.CLIENT_LEFT]
            assert served.counts[HttpEvent.CLIENT_LEFT] == 1
            assert served.counts[HttpEvent.HANDLER_FAILED] == 0

    run(scenario())


def test_httpx_leaving_mid_stream_is_noticed(run: Run) -> None:
    async def scenario() -> None:
        told = Told()
        async with serving(told.endless) as served, served.client() as client:
            async with client.stream("POST", "/") as response:
                async for _ in response.aiter_bytes():
                    break
            await until(lambda: bool(told.reasons))
            assert told.reasons == [Disconnect.CLIENT_LEFT]

    run(scenario())


def test_a_half_closed_client_still_gets_its_answer(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0.1)  # several probes long
        await three_events(request, responder)

    async def scenario() -> None:
        async with serving(handler) as served:
            reader, writer = await served.connect()
            writer.write(GET)
            writer.write_eof()
            received = await reader.read()
            head, _, rest = received.partition(b"HTTP/1.1 200 OK")
            assert head
            assert head.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"") == b""
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()

    run(scenario())


def small_receiver(port: int, data: bytes = GET) -> socket.socket:
    """A connected client that will hold little and read nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(data)
    return sock


def test_a_client_that_does_not_read_holds_the_stream_back(run: Run) -> None:
    written_bytes = 0
    outcome: list[Disconnect] = []

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal written_bytes
        stream = await responder.start_stream(200)
        try:
            while True:
                stream.write(b"x" * 1000)
                written_bytes += 1000
                await stream.wait_ready()
        except Disconnected as gone:
            outcome.append(gone.reason)

    async def scenario() -> None:
        limits = Limits(sweep_s=0.02, write_stall_s=0.3, high_water_bytes=20_000, low_water_bytes=5_000)
        async with serving(handler, limits) as served:
            with small_receiver(served.port):
                await until(lambda: bool(outcome))
        assert outcome == [Disconnect.WRITE_STALLED]
        assert served.counts[HttpEvent.WRITE_STALLED] == 1
        # What the kernel took at once, and the mark: far from what would have been written in 0.3 s.
        assert written_bytes < 6_000_000

    run(scenario())


def test_a_stream_that_ignores_back_pressure_loses_its_client(run: Run) -> None:
    outcome: list[Disconnect] = []
    most_bytes = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal most_bytes
        stream = await responder.start_stream(200)
        while responder.disconnected is None:
            stream.write(b"x" * 10_000)
            if not stream.ready:
                most_bytes += 10_000
            if most_bytes % 50_000 == 0:
                await asyncio.sleep(0)
        outcome.append(responder.disconnected)

    async def scenario() -> None:
        limits = Limits(high_water_bytes=20_000, low_water_bytes=5_000, overflow_bytes=500_000)
        async with serving(handler, limits) as served:
            with small_receiver(served.port):
                await until(lambda: bool(outcome))
        assert outcome == [Disconnect.WRITE_OVERFLOW]
        assert most_bytes <= 600_000
        assert served.counts[HttpEvent.WRITE_OVERFLOW] == 1

    run(scenario())


def test_the_last_answer_may_stall_too(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        responder.answer(200, (), b"x" * 20_000_000)

    async def scenario() -> None:
        async with serving(handler, Limits(sweep_s=0.02, write_stall_s=0.2)) as served:
            with small_receiver(served.port, LAST_GET):
                await until(lambda: served.server.connections == 1)
                await until(lambda: served.server.connections == 0)
        assert served.counts[HttpEvent.WRITE_STALLED] == 1

    run(scenario())


def test_a_slow_reader_that_reads_is_not_stalled(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"x" * 16_000_000)

    async def scenario() -> None:
        async with serving(handler, Limits(sweep_s=0.02, write_stall_s=1.0)) as served:
            reader, writer = await served.connect()
            writer.write(LAST_GET)
            received = 0
            while data := await reader.read(400_000):
                received += len(data)
                await asyncio.sleep(0.03)  # about 60 times: in all longer than a stall may be
            assert received > 16_000_000
            assert served.counts[HttpEvent.WRITE_STALLED] == 0
            writer.close()

    run(scenario())


def test_answers_do_not_pile_up_for_a_client_that_only_sends(run: Run) -> None:
    started = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal started
        started += 1
        responder.answer(200, (), b"x" * 100_000)

    async def scenario() -> None:
        async with serving(handler, Limits(sweep_s=0.02, write_stall_s=0.3)) as served:
            with small_receiver(served.port) as sock:
                sock.sendall(GET * 200)
                await until(lambda: served.counts[HttpEvent.WRITE_STALLED] == 1)
        assert started < 100

    run(scenario())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("fault", ["raise", "return", "cancel"])
def test_a_handler_that_fails(run: Run, caplog: pytest.LogCaptureFixture, begun: bool, fault: str) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        if begun:
            stream = await responder.start_stream(200)
            stream.write(b"part")
            await asyncio.sleep(0.02)
        if fault == "raise":
            raise ValueError("the prompt was: " + "s\x65cret")
        if fault == "cancel":
            raise asyncio.CancelledError

    async def scenario() -> None:
        async with serving(handler) as served:
            try:
                received = await served.exchange(GET)
            except ConnectionResetError:
                received = b""
            if begun:
                assert not received.endswith(b"0\r\n\r\n")
            else:
                assert received.startswith(b"HTTP/1.1 500 ")
                assert b"connection: close" in received
                assert json.loads(received.split(b"\r\n\r\n")[1])["error"]["type"] == "server_error"
            assert served.counts[HttpEvent.HANDLER_FAILED] == 1

    run(scenario())
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert not any("secret" in line for line in lines)
    (told,) = [entry for entry in map(json.loads, lines) if entry["event"] == "http_handler_failed"]
    assert told["started"] is begun
    assert ("ValueError" in told["exception"]) if fault == "raise" else told["reason"]


def test_misuse_of_a_responder_is_an_error(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        with pytest.raises(ValueError, match="control character"):
            await responder.send(200, [(b"x", b"a\r\nb: c")])
        with pytest.raises(ValueError, match="may be set"):
            await responder.send(200, [(b"Content-Length", b"3")])
        with pytest.raises(ValueError, match="no body"):
            await responder.send(204, (), b"x")
        with pytest.raises(ValueError, match="final"):
            await responder.send(102)
        with pytest.raises(ValueError, match="unknown"):
            await responder.send(299)
        stream = await responder.start_stream(200)
        with pytest.raises(RuntimeError, match="started before"):
            await responder.send(200)
        stream.end()
        with pytest.raises(RuntimeError, match="has ended"):
            stream.write(b"x")

    async def scenario() -> None:
        async with serving(handler) as served, served.client() as client:
            assert (await client.get("/")).status_code == 200
            assert served.counts[HttpEvent.HANDLER_FAILED] == 0

    run(scenario())


def test_idle_connections_and_slow_headers_end(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo, Limits(sweep_s=0.02, header_s=1.0, idle_s=1.0)) as served:
            slow, received = await asyncio.gather(served.exchange(GET[:-5]), served.exchange(GET))
            assert slow.startswith(b"HTTP/1.1 408 ")
            assert received.startswith(b"HTTP/1.1 200 ")
            assert received.count(b"HTTP/1.1") == 1

    run(scenario())


def test_one_connection_too_many_is_refused(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo, Limits(connections=1)) as served:
            _, first = await served.connect()
            await until(lambda: served.server.connections == 1)
            received = await served.exchange(b"")
            assert received.startswith(b"HTTP/1.1 503 ")
            assert served.counts[HttpEvent.CONNECTION_REFUSED] == 1
            first.close()
            await until(lambda: served.server.connections == 0)
            assert (await served.exchange(LAST_GET)).startswith(b"HTTP/1.1 200 ")

    run(scenario())


def gated(gate: asyncio.Event, began: asyncio.Event) -> Handler:
    async def handler(request: Request, responder: Responder) -> None:
        began.set()
        await gate.wait()
        await responder.send(200, (), b"done")

    return handler


def test_drain_lets_what_runs_finish(run: Run) -> None:
    async def scenario() -> None:
        gate, began = asyncio.Event(), asyncio.Event()
        async with serving(gated(gate, began)) as served:
            port = served.port
            idle_reader, idle_writer = await served.connect()
            answer = asyncio.ensure_future(served.exchange(GET + GET))
            await began.wait()
            draining = asyncio.ensure_future(served.server.drain(5))
            assert await idle_reader.read() == b""
            with pytest.raises(OSError, match="Connect"):
                await asyncio.open_connection("127.0.0.1", port)
            gate.set()
            received = await answer
            assert received.count(b"HTTP/1.1 200 OK") == 1
            assert b"connection: close" in received
            assert await draining == 0
            idle_writer.close()

    run(scenario())


def test_drain_cuts_what_does_not_finish(run: Run) -> None:
    async def scenario() -> None:
        told = Told()
        cancelled: list[bool] = []

        async def stubborn(request: Request, responder: Responder) -> None:
            told.began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(responder.disconnected is Disconnect.DRAIN_CUT)
                raise

        async def handler(request: Request, responder: Responder) -> None:
            await (stubborn if request.path == "/stubborn" else told.endless)(request, responder)

        async with serving(handler) as served:
            _, first = await served.connect()
            first.write(b"GET /stubborn HTTP/1.1\r\nHost: x\r\n\r\n")
            await told.began.wait()
            told.began.clear()
            _, second = await served.connect()
            second.write(GET)
            await told.began.wait()
            assert await served.server.drain(0.05) == 2
            assert told.reasons == [Disconnect.DRAIN_CUT]
            assert cancelled == [True]
            assert served.counts[HttpEvent.DRAIN_CUT] == 2
            first.close()
            second.close()

    run(scenario())


def test_serving_bound_sockets(run: Run) -> None:
    async def scenario() -> None:
        server = HttpServer(echo)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        await server.serve(sockets=sockets)
        assert len(server.addresses) == 2
        async with httpx.AsyncClient(trust_env=False) as client:
            for _, port in server.addresses:
                assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 200
        await server.drain(1)
        with pytest.raises(RuntimeError, match="drained"):
            await server.serve()

    run(scenario())
