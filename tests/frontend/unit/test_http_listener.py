"""Connections beyond what a server may have, or the system gives: each is answered, and the rest go on."""

import asyncio
import socket
from contextlib import suppress

import pytest

from kvrouter.app.lifetime import descriptors_for
from kvrouter.frontend.http import HttpEvent, HttpServer, Limits
from tests.testing.file_descriptors import no_descriptor_left
from tests.testing.http_server import GET, LAST_GET, LOOPS, QUICK, Run, echo, runner, running_server
from tests.testing.waits import until


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def test_a_connection_without_a_descriptor_gets_a_503(run: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        server = HttpServer(echo, QUICK)
        listening = socket.create_server(("127.0.0.1", 0))
        callers = [socket.create_connection(listening.getsockname()) for _ in range(5)]
        for caller in callers:
            caller.setblocking(False)
        await server.serve(sockets=[listening])
        with no_descriptor_left():
            for caller in callers:
                answer = await loop.sock_recv(caller, 4096)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"too_many_connections" in answer
                assert await loop.sock_recv(caller, 4096) == b""
                caller.close()
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        writer.write(LAST_GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await server.drain(0)

    run(scenario())


@pytest.mark.parametrize("lingering", [1, 64])
def test_connections_over_the_limit_are_answered(run: Run, lingering: int) -> None:
    limits = Limits(connections=3, refused_connections=lingering, sweep_s=0.02, linger_s=0.2)

    async def scenario() -> None:
        async with running_server(echo, limits) as served:
            held = []
            for _ in range(3):
                reader, writer = await served.connect()
                writer.write(GET)
                await reader.readuntil(b"GET /a")
                held.append(writer)
            for _ in range(4):
                reader, _ = await served.connect()
                assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            assert served.counts[HttpEvent.CONNECTION_REFUSED] == 4
            held[0].close()
            await until(lambda: served.server.connections <= 2)
            assert (await served.exchange(LAST_GET)).startswith(b"HTTP/1.1 200 ")

    run(scenario())


def test_a_connection_over_the_descriptor_limit_is_refused(run: Run) -> None:
    async def scenario() -> None:
        async with running_server(echo, Limits(descriptors=1, sweep_s=0.02, linger_s=0.2)) as served:
            assert b"no file descriptor is left" in await served.exchange(LAST_GET)

    run(scenario())


def test_a_drain_closes_a_just_accepted_connection(run: Run) -> None:
    async def scenario() -> None:
        server = HttpServer(echo, QUICK)
        listening = socket.create_server(("127.0.0.1", 0))
        caller = socket.create_connection(listening.getsockname())
        await server.serve(sockets=[listening])
        await asyncio.sleep(0)
        await server.drain(0.0)
        assert server.connections == 0
        caller.setblocking(False)
        with caller, suppress(ConnectionResetError):  # it may not have been accepted at all
            assert await asyncio.get_running_loop().sock_recv(caller, 100) == b""

    run(scenario())


@pytest.mark.parametrize(
    ("files_max", "wanted", "connections", "numbers"),
    [
        (100_000, 16_384, 16_384, 97_952),
        (100_000, None, 16_384, 97_952),
        (1024, 16_384, 768, 896),
        (1024, None, 768, 896),
        (64, 100, 32, 48),
        (1024, 10, 10, 896),
    ],
)
def test_connections_leave_descriptors_for_the_process(
    caplog: pytest.LogCaptureFixture,
    files_max: int,
    wanted: int | None,
    connections: int,
    numbers: int,
) -> None:
    """Who asked for more than there is room for is warned, and nobody else."""
    room = descriptors_for(wanted, files_max=files_max)
    assert (room.connections_max, room.numbers_max) == (connections, numbers)
    assert ("config_warning" in caplog.text) == (wanted is not None and connections < wanted)
