"""The request plane inside one process, as a wire."""

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.memory import MemoryRequestPlane, memory_address
from kvrouter.planes.requests.port import Registration, RequestServer
from tests.support.wire import Die, Wire


async def memory_wire() -> Wire:
    plane = MemoryRequestPlane(open_timeout_s=0.05)
    n_workers = 0
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, Die]:
        nonlocal n_workers
        n_workers += 1
        registration = plane.serve(memory_address(WorkerId(n_workers), Epoch(1)), server)
        places[registration.address] = registration

        async def die() -> None:
            registration.leave("the worker died")

        return registration.address, die

    return Wire(plane, serve, memory_address(WorkerId(99), Epoch(1)), places, plane.close)
