"""The request transports, each with a way to bring up its workers: the contract runs over all of them."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from nats.aio.client import Client

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.http import HttpRequestAcceptor, HttpRequestTransport
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.transports.requests.nats import NatsRequestAcceptor, NatsRequestTransport
from kvrouter.transports.requests.port import Registration, RequestServer, RequestTransport
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from kvrouter.transports.requests.tcp.pipe import TcpAddress
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.tcp_proxy import TcpProxy

KillWorker = Callable[[], Awaitable[None]]
"""Kill the worker: it serves no longer, and says no more."""

TOKEN = "a shared secret"
NAMESPACE = "fleet-a"
SLOW_STREAM_LIMIT_S = 0.3
DEAD_AFTER_S = 3.0
"""Limits of the transports behind a :attr:`RequestTransportSetup.network`: tests of silence stay short."""

ROUTER_LIMITS = RouterLimits(open_timeout_s=3.0, heartbeat_s=0.05)
PROXIED_ROUTER_LIMITS = RouterLimits(
    open_timeout_s=3.0, heartbeat_s=0.1, dead_after_s=DEAD_AFTER_S, slow_stream_limit_s=SLOW_STREAM_LIMIT_S
)
PROXIED_WORKER_LIMITS = WorkerLimits(heartbeat_s=0.1, dead_after_s=DEAD_AFTER_S)


@dataclass
class RequestTransportSetup:
    """One transport under test: ``serve`` makes a worker reachable, and returns its address and how to kill
    it.

    ``places`` are the workers' own ends of it, by address. ``close`` takes everything down, the workers' ends
    too. An ``open_timeout_s`` and a ``dead_after_s`` of three seconds keep tests of silence short, and bear a
    machine that stands still for two.

    ``serve_again`` brings a worker back at the address that another one died at. ``network`` stands between
    the router and its workers, where a transport has one; ``reset_is_loss`` is false where an end that was
    cut off connects again, and is the same peer as before.
    """

    transport: RequestTransport
    serve: Callable[[RequestServer], Awaitable[tuple[str, KillWorker]]]
    nowhere: str
    places: dict[str, Registration]
    close: Callable[[], Awaitable[None]]
    serve_again: Callable[[str, RequestServer], Awaitable[None]] | None = None
    network: TcpProxy | None = None
    reset_is_loss: bool = True


def _one_listener(
    transport: RequestTransport,
    address_of: Callable[[int], str],
    register: Callable[[str, RequestServer], Registration],
    close: Callable[[], Awaitable[None]],
    *,
    network: TcpProxy | None = None,
    reset_is_loss: bool = True,
) -> RequestTransportSetup:
    """All workers register at one listener; a worker that dies leaves it."""
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, KillWorker]:
        address = address_of(len(places) + 1)
        await serve_again(address, server)

        async def die() -> None:
            places[address].leave("the worker died")

        return address, die

    async def serve_again(address: str, server: RequestServer) -> None:
        places[address] = register(address, server)

    async def close_all() -> None:
        if network is not None:
            network.resume()
        await close()
        if network is not None:
            await network.close()

    nowhere = address_of(99)
    return RequestTransportSetup(
        transport, serve, nowhere, places, close_all, serve_again, network, reset_is_loss
    )


async def memory_transport() -> RequestTransportSetup:
    transport = MemoryRequestTransport(open_timeout_s=3.0)
    return _one_listener(
        transport, lambda n: memory_address(WorkerId(n), Epoch(1)), transport.serve, transport.close
    )


async def http_transport() -> RequestTransportSetup:
    """One listener a worker: a worker dies with it."""
    transport = HttpRequestTransport(token=TOKEN, limits=ROUTER_LIMITS)
    acceptors: list[HttpRequestAcceptor] = []
    places: dict[str, Registration] = {}

    async def listen(port: int) -> HttpRequestAcceptor:
        acceptor = HttpRequestAcceptor("127.0.0.1", port, token=TOKEN, limits=WorkerLimits(heartbeat_s=0.05))
        await acceptor.start()
        acceptors.append(acceptor)
        return acceptor

    async def serve(server: RequestServer) -> tuple[str, KillWorker]:
        acceptor = await listen(0)
        address = acceptor.address_of(WorkerId(len(acceptors)), Epoch(1))
        places[address] = acceptor.serve(address, server)
        return address, acceptor.close

    async def serve_again(address: str, server: RequestServer) -> None:
        acceptor = await listen(urlsplit(address).port or 0)
        places[address] = acceptor.serve(address, server)

    async def close() -> None:
        await transport.close()
        for acceptor in acceptors:
            await acceptor.close()

    return RequestTransportSetup(transport, serve, "http://127.0.0.1:9/99/1", places, close, serve_again)


async def proxied_http_transport() -> RequestTransportSetup:
    acceptor = HttpRequestAcceptor("127.0.0.1", 0, token=TOKEN, limits=PROXIED_WORKER_LIMITS)
    await acceptor.start()
    network = TcpProxy("127.0.0.1", urlsplit(acceptor.address_of(WorkerId(1), Epoch(1))).port or 0)
    await network.start()
    transport = HttpRequestTransport(token=TOKEN, limits=PROXIED_ROUTER_LIMITS)

    async def close() -> None:
        await transport.close()
        await acceptor.close()

    return _one_listener(
        transport,
        lambda n: f"http://127.0.0.1:{network.port}/{n}/1",
        acceptor.serve,
        close,
        network=network,
        reset_is_loss=False,
    )


async def tcp_transport() -> RequestTransportSetup:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    transport = TcpRequestTransport(token=TOKEN, retry_most_s=0.2, limits=RouterLimits(open_timeout_s=3.0))
    return _tcp(acceptor, transport, acceptor.port)


async def proxied_tcp_transport() -> RequestTransportSetup:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN, limits=PROXIED_WORKER_LIMITS)
    await acceptor.start()
    network = TcpProxy("127.0.0.1", acceptor.port)
    await network.start()
    transport = TcpRequestTransport(
        token=TOKEN, connect_timeout_s=0.5, retry_most_s=0.2, limits=PROXIED_ROUTER_LIMITS
    )
    return _tcp(acceptor, transport, network.port, network)


def _tcp(
    acceptor: TcpRequestAcceptor, transport: TcpRequestTransport, port: int, network: TcpProxy | None = None
) -> RequestTransportSetup:
    async def close() -> None:
        await transport.close()
        await acceptor.close()

    return _one_listener(
        transport,
        lambda n: str(TcpAddress("127.0.0.1", port, WorkerId(n), Epoch(1))),
        acceptor.serve,
        close,
        network=network,
    )


async def nats_transport() -> RequestTransportSetup:
    return await _nats(ROUTER_LIMITS, dead_after_s=5.0, is_proxied=False)


async def proxied_nats_transport() -> RequestTransportSetup:
    return await _nats(PROXIED_ROUTER_LIMITS, dead_after_s=DEAD_AFTER_S, is_proxied=True)


async def _nats(limits: RouterLimits, *, dead_after_s: float, is_proxied: bool) -> RequestTransportSetup:
    """A real nats-server: a connection for the router, one for each worker. A worker dies with its own."""
    stack = AsyncExitStack()
    server = stack.enter_context(running_nats())
    network = None
    if is_proxied:
        network = await stack.enter_async_context(TcpProxy("127.0.0.1", server.port))
    router_client = await _connect(server, port=server.port if network is None else network.port)
    stack.push_async_callback(router_client.close)
    if network is not None:
        stack.callback(network.resume)
    transport = NatsRequestTransport(router_client, namespace=NAMESPACE, token=TOKEN, limits=limits)
    places: dict[str, Registration] = {}
    worker_limits = WorkerLimits(heartbeat_s=dead_after_s / 6, dead_after_s=dead_after_s)

    async def serve(worker: RequestServer) -> tuple[str, KillWorker]:
        address = f"nats://{NAMESPACE}/{len(places) + 1}/1"
        return address, await register(address, worker)

    async def serve_again(address: str, worker: RequestServer) -> None:
        await register(address, worker)

    async def register(address: str, worker: RequestServer) -> KillWorker:
        client = await _connect(server, port=server.port)
        stack.push_async_callback(client.close)
        acceptor = NatsRequestAcceptor(client, namespace=NAMESPACE, token=TOKEN, limits=worker_limits)
        await acceptor.start()
        stack.push_async_callback(acceptor.close)
        worker_id, incarnation = address.split("/")[3:]
        assert address == acceptor.address_of(WorkerId(int(worker_id)), Epoch(int(incarnation)))
        places[address] = acceptor.serve(address, worker)
        await places[address].served()
        return acceptor.close

    stack.push_async_callback(transport.close)
    return RequestTransportSetup(
        transport,
        serve,
        f"nats://{NAMESPACE}/99/1",
        places,
        stack.aclose,
        serve_again,
        network,
        reset_is_loss=network is None,
    )


async def _connect(server: NatsServer, *, port: int) -> Client:
    """A client of ``server``, by way of ``port``; it comes back soon when it was cut off."""

    async def ignore(_error: Exception) -> None:
        """A test that cuts the connection knows that it is cut."""

    client = Client()
    await client.connect(
        server.url.replace(f":{server.port}", f":{port}"),
        error_cb=ignore,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.05,  # type: ignore[arg-type]  # it sleeps for it
    )
    return client


MakeSetup = Callable[[], Awaitable[RequestTransportSetup]]

REQUEST_TRANSPORTS: dict[str, MakeSetup] = {
    "http": http_transport,
    "memory": memory_transport,
    "nats": nats_transport,
    "tcp": tcp_transport,
}

PROXIED_REQUEST_TRANSPORTS: dict[str, MakeSetup] = {
    "http": proxied_http_transport,
    "nats": proxied_nats_transport,
    "tcp": proxied_tcp_transport,
}
"""Those that can lose their network: each with a proxy between its ends, and short timeouts."""
