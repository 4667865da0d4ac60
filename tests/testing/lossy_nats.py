"""Both ends of the request plane over NATS, whose messages a test may lose."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from nats.aio.client import Client

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.nats import NatsRequestAcceptor, NatsRequestTransport
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.nats_server import NatsServer
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker

NAMESPACE = "fleet a"
TOKEN = "t0p"
PATIENCE_S = 30.0
"""What an end is given that must not be the one to end the test."""

MessageFilter = Callable[[str, bytes], bool]
"""(subject, message)"""


class LossyClient(Client):
    """A client whose messages a test loses on their way out."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: MessageFilter = lambda _subject, _message: False
        self.n_lost = self.n_published = 0
        self.is_away = False
        """Whether the client is to say that it is not connected."""
        self.subject = ""
        self.errors: list[Exception] = []
        """What went wrong with messages that came, and with the connection."""

    @property
    def is_connected(self) -> bool:
        return super().is_connected and not self.is_away

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.subject = subject
        if self.loses(subject, payload):
            self.n_lost += 1
        else:
            self.n_published += 1
            await super().publish(subject, payload, reply, headers)


async def lossy_client(server: NatsServer) -> LossyClient:
    client = LossyClient()

    async def note(error: Exception) -> None:
        client.errors.append(error)

    await client.connect(
        server.url,
        error_cb=note,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.05,  # type: ignore[arg-type]  # it sleeps for it
    )
    return client


class LossyNatsHarness:
    """A worker and a plane, each with a connection of its own."""

    def __init__(
        self,
        transport: NatsRequestTransport,
        acceptor: NatsRequestAcceptor,
        clients: tuple[LossyClient, LossyClient],
        refused: list[str],
    ) -> None:
        self.transport = transport
        self.acceptor = acceptor
        self.router_client, self.worker_client = clients
        self.refused = refused
        self.worker = ScriptedWorker()
        self.address = acceptor.address_of(WorkerId(7), Epoch(1))
        self.place = acceptor.serve(self.address, self.worker)


@asynccontextmanager
async def lossy_nats(
    server: NatsServer,
    *,
    router_token: str = TOKEN,
    open_timeout_s: float = IN_TIME_S,
    dead_after_s: float = PATIENCE_S,
) -> AsyncIterator[LossyNatsHarness]:
    clients = (await lossy_client(server), await lossy_client(server))
    refused: list[str] = []
    transport = NatsRequestTransport(
        clients[0],
        namespace=NAMESPACE,
        token=router_token,
        limits=RouterLimits(
            open_timeout_s=open_timeout_s,
            heartbeat_s=0.05,
            dead_after_s=dead_after_s,
            slow_stream_limit_s=PATIENCE_S,
        ),
    )
    acceptor = NatsRequestAcceptor(
        clients[1],
        namespace=NAMESPACE,
        token=TOKEN,
        limits=WorkerLimits(heartbeat_s=dead_after_s / 6, dead_after_s=dead_after_s),
        on_refused=refused.append,
    )
    await acceptor.start()
    harness = LossyNatsHarness(transport, acceptor, clients, refused)
    await harness.place.served()
    try:
        yield harness
    finally:
        await transport.close()
        await acceptor.close()
        for client in clients:
            # nats-py's own, when its server is down; from Python 3.12 on asyncio's, of a closed transport
            with suppress(OSError, TypeError):
                await client.close()
