"""The tcp request plane over loopback, as a wire: every worker behind one listener."""

from dataclasses import replace

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.port import Registration, RequestServer
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from kvrouter.transports.requests.tcp.pipe import TcpAddress
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.request_transport import (
    DEAD_AFTER_S,
    SLOW_STREAM_LIMIT_S,
    KillWorker,
    RequestTransportSetup,
)
from tests.testing.tcp_proxy import TcpProxy

TOKEN = "a shared secret"


async def tcp_transport() -> RequestTransportSetup:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    return _setup(
        acceptor,
        TcpRequestTransport(token=TOKEN, retry_most_s=0.2, limits=RouterLimits(open_timeout_s=1.0)),
        acceptor.port,
    )


async def proxied_tcp_transport() -> RequestTransportSetup:
    acceptor = TcpRequestAcceptor(
        "127.0.0.1", token=TOKEN, limits=WorkerLimits(heartbeat_s=0.1, dead_after_s=DEAD_AFTER_S)
    )
    await acceptor.start()
    network = TcpProxy("127.0.0.1", acceptor.port)
    await network.start()
    transport = TcpRequestTransport(
        token=TOKEN,
        connect_timeout_s=0.5,
        retry_most_s=0.2,
        limits=RouterLimits(
            open_timeout_s=1.5,
            heartbeat_s=0.1,
            dead_after_s=DEAD_AFTER_S,
            slow_stream_limit_s=SLOW_STREAM_LIMIT_S,
        ),
    )
    setup = _setup(acceptor, transport, network.port)
    inner_close = setup.close

    async def close() -> None:
        network.resume()
        await inner_close()
        await network.close()

    return replace(setup, network=network, close=close)


def _setup(acceptor: TcpRequestAcceptor, transport: TcpRequestTransport, port: int) -> RequestTransportSetup:
    places: dict[str, Registration] = {}

    def address_of(worker_id: int) -> str:
        return str(TcpAddress("127.0.0.1", port, WorkerId(worker_id), Epoch(1)))

    async def serve(server: RequestServer) -> tuple[str, KillWorker]:
        address = address_of(len(places) + 1)
        await serve_again(address, server)

        async def die() -> None:
            places[address].leave("the worker died")

        return address, die

    async def serve_again(address: str, server: RequestServer) -> None:
        places[address] = acceptor.serve(address, server)

    async def close() -> None:
        await transport.close()
        await acceptor.close()

    return RequestTransportSetup(transport, serve, address_of(99), places, close, serve_again)
