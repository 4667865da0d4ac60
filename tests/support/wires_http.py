"""The request plane over HTTP, as a wire: one listener a worker, so that one can die alone."""

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.http import HttpRequestAcceptor, HttpRequestPlane
from kvrouter.planes.requests.port import Registration, RequestServer
from tests.support.wire import Die, Wire


async def http_wire() -> Wire:
    plane = HttpRequestPlane(token="t0p", open_timeout_s=1.0, heartbeat_s=0.05)
    acceptors: list[HttpRequestAcceptor] = []
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, Die]:
        acceptor = HttpRequestAcceptor("127.0.0.1", 0, token="t0p", heartbeat_s=0.05)
        await acceptor.start()
        acceptors.append(acceptor)
        address = acceptor.address_of(WorkerId(len(acceptors)), Epoch(1))
        places[address] = acceptor.serve(address, server)
        return address, acceptor.close

    async def close() -> None:
        await plane.close()
        for acceptor in acceptors:
            await acceptor.close()

    return Wire(plane, serve, "http://127.0.0.1:9/99/1", places, close)
