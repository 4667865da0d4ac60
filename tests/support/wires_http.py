"""The request plane over HTTP, as a wire: one listener a worker, so that one can die alone."""

from urllib.parse import urlsplit

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.http import HttpRequestAcceptor, HttpRequestPlane
from kvrouter.planes.requests.port import Registration, RequestServer
from tests.support.wire import Die, Wire


async def http_wire() -> Wire:
    plane = HttpRequestPlane(token="t0p", open_timeout_s=1.0, heartbeat_s=0.05)
    acceptors: list[HttpRequestAcceptor] = []
    places: dict[str, Registration] = {}

    async def listen(port: int) -> HttpRequestAcceptor:
        acceptor = HttpRequestAcceptor("127.0.0.1", port, token="t0p", heartbeat_s=0.05)
        await acceptor.start()
        acceptors.append(acceptor)
        return acceptor

    async def serve(server: RequestServer) -> tuple[str, Die]:
        acceptor = await listen(0)
        address = acceptor.address_of(WorkerId(len(acceptors)), Epoch(1))
        places[address] = acceptor.serve(address, server)
        return address, acceptor.close

    async def serve_again(address: str, server: RequestServer) -> None:
        acceptor = await listen(urlsplit(address).port or 0)
        places[address] = acceptor.serve(address, server)

    async def close() -> None:
        await plane.close()
        for acceptor in acceptors:
            await acceptor.close()

    return Wire(plane, serve, "http://127.0.0.1:9/99/1", places, close, serve_again)
