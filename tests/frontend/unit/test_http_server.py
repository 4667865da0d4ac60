"""The server on real sockets, on both event loops: order, streams, handlers that fail, draining."""

import asyncio
import json
import socket
import time
from typing import NoReturn

import httpx
import pytest

from kvrouter.frontend.http import (
    Disconnect,
    Handler,
    HttpEvent,
    HttpServer,
    Limits,
    Request,
    Responder,
)
from kvrouter.telemetry import configure_logging
from tests.testing.http_server import (
    GET,
    LAST_GET,
    LOOPS,
    RecordingServerEvents,
    Run,
    echo,
    runner,
    running_server,
    three_events,
)
from tests.testing.log_streams import LogStream
from tests.testing.waits import until


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def test_a_single_connection_carries_answers_and_streams(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await (three_events if request.path == "/stream" else echo)(request, responder)

    async def scenario() -> None:
        async with running_server(handler) as served, served.client() as client:
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
        # The first would be the last to finish, if they ran next to each other.
        await asyncio.sleep(0.05 if request.path == "/0" else 0)
        await responder.send(200, (), request.path.encode())

    async def scenario() -> None:
        async with running_server(handler) as served:
            many = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(30))
            received = await served.exchange(
                many + b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            bodies = [part.split(b"\r\n\r\n")[1] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
            assert bodies == [b"/%d" % n for n in range(30)] + [b"/end"]

    run(scenario())


def test_head_requests_get_headers_and_no_body(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await (three_events if request.path == "/stream" else echo)(request, responder)

    async def scenario() -> None:
        async with running_server(handler) as served:
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
def test_a_refusal_follows_the_pending_answers(run: Run, data: bytes, status: int) -> None:
    async def scenario() -> None:
        async with running_server(echo, Limits(body_bytes=1_000_000, linger_s=1)) as served:
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


@pytest.mark.parametrize("tail", [b"", b"nothing\r\n\r\n"])
def test_requests_before_a_half_close_are_answered(run: Run, tail: bytes) -> None:
    """The handler of the first request waits until the end of the input has been seen."""

    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def slow(request: Request, responder: Responder) -> None:
            await may_answer.wait()
            await echo(request, responder)

        async with running_server(slow) as served:
            reader, writer = await served.connect()
            writer.write(GET * 3 + tail)
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.05, may_answer.set)
            answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
            answers = [answer for answer in answers if not answer.startswith(b"102 ")]  # is it still there?
            assert [answer[:3] for answer in answers] == [b"200"] * 3 + [b"400"] * bool(tail)
            assert [b"connection: close" in answer for answer in answers] == (
                [False] * (len(answers) - 1) + [True]
            )
            writer.close()

    run(scenario())


def test_a_client_sending_a_too_long_body_can_read_its_413(run: Run) -> None:
    async def scenario() -> None:
        limits = Limits(body_bytes=1_000, linger_s=0.5, sweep_s=0.02, body_s=60)
        async with running_server(echo, limits) as served:
            reader, writer = await served.connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            began_s = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < began_s + 1.2:  # longer than the server would wait
                writer.write(b"x" * 1_000)
                await writer.drain()
                await asyncio.sleep(0.02)
            assert (await reader.read()).startswith(b"HTTP/1.1 413")

    run(scenario())


def test_reading_of_a_too_long_body_ends(run: Run) -> None:
    async def scenario() -> None:
        limits = Limits(body_bytes=1_000, linger_s=0.1, sweep_s=0.02, body_s=0.3)
        async with running_server(echo, limits) as served:
            _, writer = await served.connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            with pytest.raises(ConnectionError):
                await send_on(writer)

    async def send_on(writer: asyncio.StreamWriter) -> NoReturn:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    run(scenario())


def test_expect_continue_is_answered_with_100(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo) as served:
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
        async with running_server(three_events) as served:
            received = await served.exchange(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head, body = received.split(b"\r\n\r\n", 1)
            assert b"transfer-encoding" not in head
            assert b"keep-alive" not in head
            assert body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"

    run(scenario())


def test_http_1_0_keep_alive_is_honoured(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo) as served:
            one = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
            received = await served.exchange(one + b"GET /b HTTP/1.0\r\n\r\n")
            first, second = received.split(b"HTTP/1.1 ")[1:]
            assert b"connection: keep-alive" in first
            assert b"connection" not in second

    run(scenario())


def test_tokens_of_one_loop_turn_are_sent_in_one_chunk(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        stream = responder.start_stream(200)
        for _ in range(5):
            stream.write(b"ab")
        stream.end()
        stream.end()

    async def scenario() -> None:
        async with running_server(handler) as served:
            received = await served.exchange(LAST_GET)
            assert received.split(b"\r\n\r\n", 1)[1] == b"a\r\nababababab\r\n0\r\n\r\n"

    run(scenario())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("fault", ["raise", "return", "cancel"])
def test_a_failing_handler_is_answered_or_cut_and_reported(run: Run, begun: bool, fault: str) -> None:
    log = LogStream()
    configure_logging("info", log_format="json", stream=log)

    async def handler(request: Request, responder: Responder) -> None:
        if begun:
            stream = responder.start_stream(200)
            stream.write(b"part")
            await asyncio.sleep(0.02)
        if fault == "raise":
            raise ValueError("the prompt was: " + "s\x65cret")
        if fault == "cancel":
            raise asyncio.CancelledError

    async def scenario() -> None:
        async with running_server(handler) as served:
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
    lines = log.getvalue()
    assert "secret" not in lines
    entries = map(json.loads, lines.splitlines())
    (reported,) = [entry for entry in entries if entry["event"] == "http_handler_failed"]
    assert reported["started"] is begun
    assert ("ValueError" in reported["exception"]) if fault == "raise" else reported["reason"]


def test_misuse_of_a_responder_raises(run: Run) -> None:
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
            await responder.send(600)
        stream = responder.start_stream(200)
        with pytest.raises(RuntimeError, match="started before"):
            await responder.send(200)
        stream.end()
        with pytest.raises(RuntimeError, match="has ended"):
            stream.write(b"x")

    async def scenario() -> None:
        async with running_server(handler) as served, served.client() as client:
            assert (await client.get("/")).status_code == 200
            assert served.counts[HttpEvent.HANDLER_FAILED] == 0

    run(scenario())


def test_idle_connections_and_slow_headers_end(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo, Limits(sweep_s=0.02, header_s=1.0, idle_s=1.0)) as served:
            slow, received = await asyncio.gather(served.exchange(GET[:-5]), served.exchange(GET))
            assert slow.startswith(b"HTTP/1.1 408 ")
            assert received.startswith(b"HTTP/1.1 200 ")
            assert received.count(b"HTTP/1.1") == 1

    run(scenario())


def test_a_blocked_loop_reads_before_timeouts_count(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo, Limits(sweep_s=0.5, header_s=0.3, idle_s=0.3)) as served:
            reader, writer = await served.connect()
            await until(lambda: served.server.connections == 1)
            time.sleep(1.5)  # noqa: ASYNC251 - this is what is tested
            asyncio.get_running_loop().call_later(0.0, writer.write, LAST_GET)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")

    run(scenario())


def test_a_connection_over_the_limit_is_refused(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo, Limits(connections=1)) as served:
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


def test_drain_waits_for_running_requests(run: Run) -> None:
    async def scenario() -> None:
        gate, began = asyncio.Event(), asyncio.Event()
        async with running_server(gated(gate, began)) as served:
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


def test_drain_cuts_unfinished_requests(run: Run) -> None:
    async def scenario() -> None:
        reported = RecordingServerEvents()
        cancelled: list[bool] = []

        async def stubborn(request: Request, responder: Responder) -> None:
            reported.began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(responder.disconnected is Disconnect.DRAIN_CUT)
                raise

        async def handler(request: Request, responder: Responder) -> None:
            await (stubborn if request.path == "/stubborn" else reported.endless)(request, responder)

        async with running_server(handler) as served:
            _, first = await served.connect()
            first.write(b"GET /stubborn HTTP/1.1\r\nHost: x\r\n\r\n")
            await reported.began.wait()
            reported.began.clear()
            _, second = await served.connect()
            second.write(GET)
            await reported.began.wait()
            assert await served.server.drain(0.05) == 2
            assert reported.reasons == [Disconnect.DRAIN_CUT]
            assert cancelled == [True]
            assert served.counts[HttpEvent.DRAIN_CUT] == 2
            first.close()
            second.close()

    run(scenario())


def test_bound_sockets_are_served_until_drained(run: Run) -> None:
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
