"""The request plane over a real nats-server, as a wire: a connection for the router, one for each worker."""

from contextlib import AsyncExitStack
from dataclasses import replace

from nats.aio.client import Client

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.nats import NatsRequestAcceptor, NatsRequestTransport
from kvrouter.transports.requests.port import Registration, RequestServer
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.request_transport import (
    DEAD_AFTER_S,
    SLOW_STREAM_LIMIT_S,
    KillWorker,
    RequestTransportSetup,
)
from tests.testing.tcp_proxy import TcpProxy

NAMESPACE = "fleet-a"
TOKEN = "t0p"


async def connect_client(server: NatsServer, *, port: int = 0) -> Client:
    """A client of ``server``, by way of ``port``; it comes back soon when it was cut off."""

    async def ignore(_error: Exception) -> None:
        """A test that cuts the connection knows that it is cut."""

    url = server.url.replace(f":{server.port}", f":{port or server.port}")
    client = Client()
    await client.connect(
        url,
        error_cb=ignore,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.05,  # type: ignore[arg-type]  # it sleeps for it
    )
    return client


async def nats_transport() -> RequestTransportSetup:
    stack = AsyncExitStack()
    server = stack.enter_context(running_nats())
    client = await connect_client(server)
    stack.push_async_callback(client.close)
    transport = NatsRequestTransport(
        client, namespace=NAMESPACE, token=TOKEN, limits=RouterLimits(open_timeout_s=1.0, heartbeat_s=0.05)
    )
    return _setup(server, transport, stack, dead_after_s=5.0)


async def proxied_nats_transport() -> RequestTransportSetup:
    stack = AsyncExitStack()
    server = stack.enter_context(running_nats())
    network = await stack.enter_async_context(TcpProxy("127.0.0.1", server.port))
    client = await connect_client(server, port=network.port)
    stack.push_async_callback(client.close)
    stack.callback(network.resume)
    transport = NatsRequestTransport(
        client,
        namespace=NAMESPACE,
        token=TOKEN,
        limits=RouterLimits(
            open_timeout_s=1.5,
            heartbeat_s=0.1,
            dead_after_s=DEAD_AFTER_S,
            slow_stream_limit_s=SLOW_STREAM_LIMIT_S,
        ),
    )
    setup = _setup(server, transport, stack, dead_after_s=DEAD_AFTER_S)
    return replace(setup, network=network, reset_is_loss=False)


def _setup(
    server: NatsServer, transport: NatsRequestTransport, stack: AsyncExitStack, *, dead_after_s: float
) -> RequestTransportSetup:
    places: dict[str, Registration] = {}

    async def serve(worker: RequestServer) -> tuple[str, KillWorker]:
        return await _serve(f"nats://{NAMESPACE}/{len(places) + 1}/1", worker)

    async def serve_again(address: str, worker: RequestServer) -> None:
        await _serve(address, worker)

    async def _serve(address: str, worker: RequestServer) -> tuple[str, KillWorker]:
        client = await connect_client(server)
        stack.push_async_callback(client.close)
        acceptor = NatsRequestAcceptor(
            client,
            namespace=NAMESPACE,
            token=TOKEN,
            limits=WorkerLimits(heartbeat_s=dead_after_s / 6, dead_after_s=dead_after_s),
        )
        await acceptor.start()
        stack.push_async_callback(acceptor.close)
        worker_id, incarnation = address.split("/")[3:]
        assert address == acceptor.address_of(WorkerId(int(worker_id)), Epoch(int(incarnation)))
        places[address] = acceptor.serve(address, worker)
        await places[address].served()
        return address, acceptor.close

    stack.push_async_callback(transport.close)
    return RequestTransportSetup(
        transport, serve, f"nats://{NAMESPACE}/99/1", places, stack.aclose, serve_again
    )
