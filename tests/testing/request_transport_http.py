"""The request plane over HTTP, as a wire."""

from urllib.parse import urlsplit

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.http import HttpRequestAcceptor, HttpRequestTransport
from kvrouter.transports.requests.port import Registration, RequestServer
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.request_transport import (
    DEAD_AFTER_S,
    SLOW_STREAM_LIMIT_S,
    KillWorker,
    RequestTransportSetup,
)
from tests.testing.tcp_proxy import TcpProxy

TOKEN = "t0p"


async def http_transport() -> RequestTransportSetup:
    """One listener a worker: a worker dies with it."""
    transport = HttpRequestTransport(token=TOKEN, limits=RouterLimits(open_timeout_s=1.0, heartbeat_s=0.05))
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
    """Every worker behind one listener, and a proxy before it."""
    acceptor = HttpRequestAcceptor(
        "127.0.0.1", 0, token=TOKEN, limits=WorkerLimits(heartbeat_s=0.1, dead_after_s=DEAD_AFTER_S)
    )
    await acceptor.start()
    network = TcpProxy("127.0.0.1", urlsplit(acceptor.address_of(WorkerId(1), Epoch(1))).port or 0)
    await network.start()
    transport = HttpRequestTransport(
        token=TOKEN,
        limits=RouterLimits(
            open_timeout_s=1.5,
            heartbeat_s=0.1,
            dead_after_s=DEAD_AFTER_S,
            slow_stream_limit_s=SLOW_STREAM_LIMIT_S,
        ),
    )
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, KillWorker]:
        address = f"http://127.0.0.1:{network.port}/{len(places) + 1}/1"
        await serve_again(address, server)

        async def die() -> None:
            places[address].leave("the worker died")

        return address, die

    async def serve_again(address: str, server: RequestServer) -> None:
        places[address] = acceptor.serve(address, server)

    async def close() -> None:
        network.resume()
        await transport.close()
        await acceptor.close()
        await network.close()

    nowhere = f"http://127.0.0.1:{network.port}/99/1"
    return RequestTransportSetup(
        transport, serve, nowhere, places, close, serve_again, network, reset_is_loss=False
    )
