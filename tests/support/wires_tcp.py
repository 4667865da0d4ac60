"""The tcp request plane over loopback, as a wire: every worker behind one listener."""

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.port import Registration, RequestServer
from kvrouter.planes.requests.tcp import TcpRequestAcceptor, TcpRequestPlane
from tests.support.wire import Die, Wire

TOKEN = "a shared secret"


async def tcp_wire() -> Wire:
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    plane = TcpRequestPlane(token=TOKEN, open_timeout_s=1.0)
    n_workers = 0
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, Die]:
        nonlocal n_workers
        n_workers += 1
        address = acceptor.address_of(WorkerId(n_workers), Epoch(1))
        registration = places[address] = acceptor.serve(address, server)

        async def die() -> None:
            registration.leave("the worker died")

        return address, die

    async def close() -> None:
        await plane.close()
        await acceptor.close()

    return Wire(plane, serve, acceptor.address_of(WorkerId(99), Epoch(1)), places, close)
