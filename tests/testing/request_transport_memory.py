"""The request plane inside one process, as a wire."""

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.transports.requests.port import Registration, RequestServer
from tests.testing.request_transport import KillWorker, RequestTransportSetup


async def memory_transport() -> RequestTransportSetup:
    transport = MemoryRequestTransport(open_timeout_s=0.05)
    places: dict[str, Registration] = {}

    async def serve(server: RequestServer) -> tuple[str, KillWorker]:
        address = memory_address(WorkerId(len(places) + 1), Epoch(1))
        await serve_again(address, server)

        async def die() -> None:
            places[address].leave("the worker died")

        return address, die

    async def serve_again(address: str, server: RequestServer) -> None:
        places[address] = transport.serve(address, server)

    return RequestTransportSetup(
        transport, serve, memory_address(WorkerId(99), Epoch(1)), places, transport.close, serve_again
    )
