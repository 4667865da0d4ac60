"""A worker's listeners when no file descriptor is left: peers get an answer, and the others are served."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import pytest
import trustme

from kvrouter.app.lifetime import share_descriptors
from kvrouter.cli.worker.worker_process import WorkerHealth, health_pages
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.settings.planes import PlaneSettings
from kvrouter.transports.listener import (
    NO_DESCRIPTOR,
    WITHOUT_DESCRIPTORS_S,
    AcceptedSocket,
    Connections,
    Listener,
    ListenerLimits,
    TcpServer,
)
from kvrouter.transports.requests.handshake import GREETING_BYTES
from kvrouter.transports.requests.http import HttpRequestAcceptor
from kvrouter.transports.requests.tcp import TcpRequestAcceptor
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.calls import WatchCalls
from tests.testing.file_descriptors import no_descriptor_left
from tests.testing.http_server import LOOPS, Run, runner
from tests.testing.processes import free_ports

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
Refused = list[str]


@asynccontextmanager
async def tcp(refused: Refused, descriptors_max: int) -> AsyncIterator[int]:
    acceptor = TcpRequestAcceptor(
        "127.0.0.1",
        token="t",
        limits=WorkerLimits(descriptors_max=descriptors_max),
        on_refused=refused.append,
    )
    await acceptor.start()
    yield acceptor.port
    await acceptor.close()


@asynccontextmanager
async def http(refused: Refused, descriptors_max: int) -> AsyncIterator[int]:
    acceptor = HttpRequestAcceptor(
        "127.0.0.1",
        0,
        token="t",
        limits=WorkerLimits(descriptors_max=descriptors_max),
        on_refused=refused.append,
    )
    await acceptor.start()
    yield int(acceptor.address_of(WorkerId(1), Epoch(1)).split(":")[2].split("/")[0])
    await acceptor.close()


Serving = Callable[[Refused, int], AbstractAsyncContextManager[int]]
PLANES: dict[str, tuple[Serving, bytes]] = {
    "tcp": (tcp, NO_DESCRIPTOR.encode()),
    "http": (http, b"HTTP/1.1 503 "),
}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def callers_at(port: int, n: int) -> list[socket.socket]:
    """Connections that the listener has not accepted yet: the loop has not turned."""
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(n)]
    for caller in callers:
        caller.setblocking(False)
    return callers


async def read_all(caller: socket.socket) -> bytes:
    """All that comes until the peer closes."""
    loop = asyncio.get_running_loop()
    read = b""
    with caller:
        while more := await loop.sock_recv(caller, 4096):
            read += more
    return read


async def is_served(port: int, plane: str) -> bool:
    """Whether a connection is served as ever."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if plane == "http":
        writer.write(HEALTH)
        served = (await reader.read()).startswith(b"HTTP/1.1 204 ")
    else:
        served = len(await reader.readexactly(GREETING_BYTES)) == GREETING_BYTES
    writer.close()
    return served


@pytest.mark.parametrize("plane", PLANES)
def test_peers_are_refused_while_no_descriptor_is_left_and_later_served(run: Run, plane: str) -> None:
    serving, answer = PLANES[plane]

    async def scenario() -> None:
        refused: Refused = []
        async with serving(refused, 1_000_000) as port:
            callers = callers_at(port, 5)
            with no_descriptor_left():
                for caller in callers:
                    assert answer in await read_all(caller)
            assert refused == [NO_DESCRIPTOR] * 5
            assert await is_served(port, plane)

    run(scenario())


@pytest.mark.parametrize("plane", PLANES)
def test_connections_over_the_descriptor_number_limit_are_refused(run: Run, plane: str) -> None:
    serving, answer = PLANES[plane]

    async def scenario() -> None:
        refused: Refused = []
        async with serving(refused, 1) as port:
            (caller,) = callers_at(port, 1)
            assert answer in await read_all(caller)
            assert refused == [NO_DESCRIPTOR]

    run(scenario())


@pytest.mark.parametrize("plane", PLANES)
def test_accepting_pauses_while_no_descriptor_is_available(
    run: Run, plane: str, watch_calls: WatchCalls
) -> None:
    serving, _ = PLANES[plane]
    tries = watch_calls(Listener, "_refuse_one")

    async def scenario() -> None:
        async with serving([], 1_000_000) as port:
            (caller,) = callers_at(port, 1)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            with no_descriptor_left(none_at_all=True):
                await asyncio.sleep(2.5 * WITHOUT_DESCRIPTORS_S)
            assert 1 <= len(tries) <= 1 + (loop.time() - began_s) / WITHOUT_DESCRIPTORS_S
            with caller:
                assert await is_served(port, plane)

    run(scenario())


def test_tls_peer_over_the_descriptor_limit_is_closed_without_an_answer(run: Run) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)

    async def scenario() -> None:
        acceptor = TcpRequestAcceptor(
            "127.0.0.1", token="t", ssl=context, limits=WorkerLimits(descriptors_max=1)
        )
        await acceptor.start()
        (caller,) = callers_at(acceptor.port, 1)
        assert await read_all(caller) == b""
        await acceptor.close()

    run(scenario())


def test_unfinished_tls_handshake_does_not_delay_close(run: Run) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)

    async def scenario() -> None:
        acceptor = TcpRequestAcceptor(
            "127.0.0.1", token="t", ssl=context, limits=WorkerLimits(hello_within_s=1000.0)
        )
        await acceptor.start()
        (caller,) = callers_at(acceptor.port, 1)
        await asyncio.sleep(0.05)  # it is accepted, and says nothing
        await acceptor.close()
        assert await read_all(caller) == b""

    run(scenario())


def test_connection_before_its_tls_handshake_is_closed_with_the_server(run: Run) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def scenario() -> None:
        server = TcpServer(asyncio.Protocol, answer=bytes, on_refused=Refused().append, ssl=context)
        await server.start("127.0.0.1", 0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        server._take(ours)
        server.close()
        await server.wait_closed()
        assert ours.fileno() == -1
        assert await read_all(theirs) == b""

    run(scenario())


def test_exception_at_accept_closes_the_connection_and_is_reported(run: Run) -> None:
    def mistaken() -> asyncio.Protocol:
        raise ZeroDivisionError("a mistake")

    async def scenario() -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context["exception"])
        )
        server = TcpServer(mistaken, answer=bytes, on_refused=Refused().append)
        port = await server.start("127.0.0.1", 0)
        (caller,) = callers_at(port, 1)
        async with asyncio.timeout(60):
            assert await read_all(caller) == b""
        assert [type(error) for error in reported] == [ZeroDivisionError]
        server.close()
        await server.wait_closed()

    run(scenario())


def resolve_names(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Let the event loop find these addresses for every name."""

    async def found(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)


async def test_resolved_address_foreign_to_the_host_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    not_ours = ("192.0.2.1", 0)
    server = TcpServer(asyncio.Protocol, answer=bytes, on_refused=Refused().append)
    resolve_names(monkeypatch, not_ours, ("127.0.0.1", 0))
    port = await server.start("a-name", 0)
    for caller in callers_at(port, 1):
        caller.close()
    server.close()
    resolve_names(monkeypatch, not_ours)
    with pytest.raises(OSError, match="Cannot assign requested address"):
        await TcpServer(asyncio.Protocol, answer=bytes, on_refused=Refused().append).start("a-name", 0)


async def test_a_start_that_fails_at_one_address_listens_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ("127.0.0.1", free_ports(1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = ("127.0.0.1", other.getsockname()[1])
        resolve_names(monkeypatch, free, taken)
        server = TcpServer(asyncio.Protocol, answer=bytes, on_refused=Refused().append)
        with pytest.raises(OSError, match="Address already in use"):
            await server.start("a-name", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(free)


def test_health_probe_gets_503_when_no_descriptor_is_left(run: Run) -> None:
    async def scenario() -> None:
        port = free_ports(1)
        planes = PlaneSettings(listen_host="127.0.0.1", health_port=port)
        async with health_pages(planes, lambda: WorkerHealth.OK):
            (caller,) = callers_at(port, 1)
            with no_descriptor_left():
                assert (await read_all(caller)).startswith(b"HTTP/1.1 503 ")

    run(scenario())


@pytest.mark.parametrize(
    ("files_max", "wanted", "connections", "numbers"),
    [(100_000, 1024, 1024, 97_952), (1024, 1024, 768, 896), (1024, 20_000, 768, 896), (64, 1024, 32, 48)],
)
def test_a_workers_connections_fit_the_limit_of_open_files(
    files_max: int, wanted: int, connections: int, numbers: int
) -> None:
    room = share_descriptors(wanted, files_max=files_max)
    assert (room.connections_max, room.numbers_max) == (connections, numbers)


async def test_connection_aborted_before_it_was_accepted_is_skipped() -> None:
    accepted, peer = socket.socketpair()

    class Scripted(socket.socket):
        """Its first connection was reset while it waited; a second one waits behind that."""

        waiting: ClassVar[list[BaseException | socket.socket]] = [
            ConnectionAbortedError(),
            accepted,
            BlockingIOError(),
        ]

        def _accept(self) -> tuple[int, object]:
            first = self.waiting.pop(0)
            if isinstance(first, BaseException):
                raise first
            return first.detach(), None

    taken: list[socket.socket] = []
    listener = Listener(
        Scripted(), loop=asyncio.get_running_loop(), take=taken.append, answer=lambda _sock: None
    )
    descriptor = accepted.fileno()
    listener._accept()
    assert [sock.fileno() for sock in taken] == [descriptor]
    listener.close()
    taken[0].close()
    peer.close()


def test_copy_of_an_accepted_socket_has_its_family_and_type() -> None:
    one, other = socket.socketpair()
    with AcceptedSocket(one.family, one.type, one.proto, one.detach()) as sock, sock.dup() as copy, other:
        assert (copy.family, copy.type) == (other.family, other.type)


def test_authenticated_connection_over_the_limit_still_times_out() -> None:
    dropped: list[str] = []
    connections = Connections(
        dropped.append, limits=ListenerLimits(connections_max=1), on_dropped=dropped.append
    )
    for name, now_s in (("first", 1.0), ("second", 2.0)):
        connections.add(name, now_s=now_s)
    assert [connections.admit(name) for name in ("first", "second", "first")] == [True, False, True]
    assert connections.older_than(3.0) == ["second"]
    connections.discard("first")
    assert connections.admit("second")
    assert connections.older_than(3.0) == []
    assert dropped == []
