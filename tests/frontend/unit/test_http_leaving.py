"""Clients that leave, or do not read: on real sockets, on both event loops."""

import asyncio
import socket
import struct
import time

import pytest

from kvrouter.frontend.http import (
    Disconnect,
    Disconnected,
    HttpEvent,
    Limits,
    Request,
    Responder,
)
from tests.testing.http_server import (
    GET,
    LAST_GET,
    LOOPS,
    RecordingServerEvents,
    Run,
    runner,
    running_server,
    three_events,
)
from tests.testing.waits import until


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


@pytest.mark.parametrize("kind", ["endless", "silent", "silent_stream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_disconnects_is_noticed(run: Run, kind: str, how: str) -> None:
    async def scenario() -> None:
        reported = RecordingServerEvents()
        async with running_server(getattr(reported, kind)) as served:
            reader, writer = await served.connect()
            writer.write(GET)
            await reported.began.wait()
            if kind != "silent":
                await reader.readuntil(b"\r\n\r\n")
            if how == "reset":
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: bool(reported.reasons))
            await until(lambda: served.server.running == 0)
            assert reported.reasons == [Disconnect.CLIENT_LEFT]
            assert served.counts[HttpEvent.CLIENT_LEFT] == 1
            assert served.counts[HttpEvent.HANDLER_FAILED] == 0

    run(scenario())


def test_httpx_leaving_mid_stream_is_noticed(run: Run) -> None:
    async def scenario() -> None:
        reported = RecordingServerEvents()
        async with running_server(reported.endless) as served, served.client() as client:
            async with client.stream("POST", "/") as response:
                async for _ in response.aiter_bytes():
                    break
            await until(lambda: bool(reported.reasons))
            assert reported.reasons == [Disconnect.CLIENT_LEFT]

    run(scenario())


def test_a_half_closed_client_still_gets_its_answer(run: Run) -> None:
    probe = b"HTTP/1.1 102 Processing\r\n\r\n"

    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            await may_answer.wait()
            await three_events(request, responder)

        async with running_server(handler) as served:
            reader, writer = await served.connect()
            writer.write(GET)
            writer.write_eof()
            for _ in range(3):
                assert await reader.readexactly(len(probe)) == probe
            may_answer.set()
            head, _, rest = (await reader.read()).partition(b"HTTP/1.1 200 OK")
            assert head.replace(probe, b"") == b""
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


def test_a_client_not_reading_holds_the_stream_back(run: Run) -> None:
    written_bytes = 0
    outcome: list[Disconnect] = []

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal written_bytes
        stream = responder.start_stream(200)
        try:
            while True:
                stream.write(b"x" * 1000)
                written_bytes += 1000
                await stream.wait_ready()
        except Disconnected as gone:
            outcome.append(gone.reason)

    async def scenario() -> None:
        limits = Limits(sweep_s=0.02, write_stall_s=0.3, high_water_bytes=20_000, low_water_bytes=5_000)
        async with running_server(handler, limits) as served:
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
        stream = responder.start_stream(200)
        while responder.disconnected is None:
            stream.write(b"x" * 10_000)
            if not stream.ready:
                most_bytes += 10_000
            if most_bytes % 50_000 == 0:
                await asyncio.sleep(0)
        outcome.append(responder.disconnected)

    async def scenario() -> None:
        limits = Limits(high_water_bytes=20_000, low_water_bytes=5_000, overflow_bytes=500_000)
        async with running_server(handler, limits) as served:
            with small_receiver(served.port):
                await until(lambda: bool(outcome))
        assert outcome == [Disconnect.WRITE_OVERFLOW]
        assert most_bytes <= 600_000
        assert served.counts[HttpEvent.WRITE_OVERFLOW] == 1

    run(scenario())


def test_a_stalled_last_answer_closes_the_connection(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        responder.answer(200, (), b"x" * 20_000_000)

    async def scenario() -> None:
        async with running_server(handler, Limits(sweep_s=0.02, write_stall_s=0.2)) as served:
            with small_receiver(served.port, LAST_GET):
                await until(lambda: served.server.connections == 1)
                await until(lambda: served.server.connections == 0)
        assert served.counts[HttpEvent.WRITE_STALLED] == 1

    run(scenario())


def test_a_blocked_loop_does_not_count_as_a_stalled_reader(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"x" * 16_000_000)

    async def scenario() -> None:
        async with running_server(handler, Limits(sweep_s=0.02, write_stall_s=1.0)) as served:
            reader, writer = await served.connect()
            writer.write(LAST_GET)
            await reader.read(1)
            for _ in range(5):
                time.sleep(0.3)  # noqa: ASYNC251 - the whole loop, its reader too
                await asyncio.sleep(0.05)
            received = 1
            while data := await reader.read(4_000_000):
                received += len(data)
            assert received > 16_000_000
            assert served.counts[HttpEvent.WRITE_STALLED] == 0
            writer.close()

    run(scenario())


def test_a_slow_but_steady_reader_is_not_stalled(run: Run) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"x" * 16_000_000)

    async def scenario() -> None:
        async with running_server(handler, Limits(sweep_s=0.02, write_stall_s=1.0)) as served:
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


def test_answers_do_not_pile_up_for_a_client_not_reading(run: Run) -> None:
    started = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal started
        started += 1
        responder.answer(200, (), b"x" * 100_000)

    async def scenario() -> None:
        async with running_server(handler, Limits(sweep_s=0.02, write_stall_s=0.3)) as served:
            with small_receiver(served.port) as sock:
                sock.sendall(GET * 200)
                await until(lambda: served.counts[HttpEvent.WRITE_STALLED] == 1)
        assert started < 100

    run(scenario())
