"""What every request transport of its own sockets does over TLS, and on the loop that servers run."""

import ssl
from collections.abc import Awaitable, Callable

import pytest
import trustme
import uvloop

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.http import HttpRequestAcceptor, HttpRequestTransport
from kvrouter.transports.requests.port import WorkerUnreachable
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from tests.testing.scripted_worker import ScriptedWorker, accepted, leg, read_all

TOKEN = "t0p"
CONNECT_LIMIT_S = 1.0
"""A client without TLS waits so long for the greeting of a server that waits for TLS."""

Context = ssl.SSLContext | None
RoundTrip = Callable[[Context, Context], Awaitable[list[int]]]


async def over_tcp(server: Context, client: Context) -> list[int]:
    return await round_trip(
        TcpRequestAcceptor("127.0.0.1", token=TOKEN, ssl=server, advertise_host="localhost"),
        TcpRequestTransport(token=TOKEN, ssl=client, connect_timeout_s=CONNECT_LIMIT_S),
    )


async def over_http(server: Context, client: Context) -> list[int]:
    return await round_trip(
        HttpRequestAcceptor("127.0.0.1", 0, token=TOKEN, ssl=server, advertise_host="localhost"),
        HttpRequestTransport(token=TOKEN, ssl=client),
    )


async def round_trip(
    acceptor: TcpRequestAcceptor | HttpRequestAcceptor, plane: TcpRequestTransport | HttpRequestTransport
) -> list[int]:
    """The tokens of one leg, from its request to its end."""
    await acceptor.start()
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    worker = ScriptedWorker()
    acceptor.serve(address, worker)
    try:
        stream = await accepted(plane, address, leg())
        worker.streams[-1].chunks.put_nowait(EngineChunk((4, 5), finish=FinishReason.STOP))
        return (await read_all(stream))[0]
    except WorkerUnreachable:
        assert worker.requests == []
        raise
    finally:
        await plane.close()
        await acceptor.close()


@pytest.fixture(params=[over_tcp, over_http], ids=["tcp", "http"])
def carry(request: pytest.FixtureRequest) -> RoundTrip:
    one: RoundTrip = request.param
    return one


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_requests_go_over_tls(carry: RoundTrip, server: ssl.SSLContext, authority: trustme.CA) -> None:
    assert await carry(server, trusting(authority)) == [4, 5]


async def test_certificate_of_another_authority_is_not_trusted(
    carry: RoundTrip, server: ssl.SSLContext
) -> None:
    with pytest.raises(WorkerUnreachable, match="certificate"):
        await carry(server, trusting(trustme.CA()))


async def test_worker_with_tls_refuses_plaintext_request(carry: RoundTrip, server: ssl.SSLContext) -> None:
    with pytest.raises(WorkerUnreachable):
        await carry(server, None)


async def test_router_with_tls_cannot_reach_plaintext_worker(carry: RoundTrip, authority: trustme.CA) -> None:
    with pytest.raises(WorkerUnreachable):
        await carry(None, trusting(authority))


def test_requests_work_on_uvloop_with_and_without_tls(
    carry: RoundTrip, server: ssl.SSLContext, authority: trustme.CA
) -> None:
    async def trip(*contexts: Context) -> list[int]:
        return await carry(*contexts)

    assert uvloop.run(trip(None, None)) == [4, 5]
    assert uvloop.run(trip(server, trusting(authority))) == [4, 5]
