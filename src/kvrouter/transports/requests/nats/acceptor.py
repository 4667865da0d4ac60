"""The worker's end of requests over NATS."""

import asyncio
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.background import spawn, tick
from kvrouter.transports.message_auth import MessageAuth, ReplayGuard
from kvrouter.transports.nats_client import CLIENT_ERRORS, flush_subscriptions, subject_name, unsubscribe
from kvrouter.transports.requests.legs import LegServer, SessionLegs
from kvrouter.transports.requests.nats.transport import (
    NatsPipe,
    PipePublisher,
    answers_subject,
    from_router,
    message_auth_of,
    requests_subject,
)
from kvrouter.transports.requests.port import RequestServer
from kvrouter.transports.requests.session import READING_MAX_BYTES
from kvrouter.transports.requests.worker_session import WORKER_LIMITS, WorkerLimits, WorkerSession

ROUTERS_MAX = 4096
"""Sessions of one worker with routers; messages of further routers are refused."""


class WorkerPipe(NatsPipe):
    """The pipe of a session with one router."""

    session: WorkerSession


class _WorkerEndpoint:
    """The subscription of one worker on NATS, and its sessions with routers."""

    def __init__(
        self,
        leg_server: LegServer,
        publisher: PipePublisher,
        limits: WorkerLimits,
        reading: ByteBudget,
        *,
        namespace: str,
        worker: tuple[WorkerId, Epoch],
        auth: MessageAuth,
        on_refused: Callable[[str], None],
    ) -> None:
        self.leg_server = leg_server
        self._publisher = publisher
        self._limits = limits
        self._reading = reading
        self._namespace = namespace
        self._worker = worker
        self._auth = auth
        self._replay_guard = ReplayGuard()
        self._on_refused = on_refused
        self._pipes: dict[tuple[str, int], WorkerPipe] = {}

    async def on_message(self, message: Msg) -> None:
        """Pass a router's message to its session."""
        try:
            number, received = from_router(self._auth, message.subject, message.data)
            key = (received.router, received.link)
            if not self._replay_guard.takes(key, number):
                raise ProtocolError("a router's message came again", param="number")
            pipe = self._pipes.get(key) or self._new_pipe(key)
        except ProtocolError as error:
            self._on_refused(error.message)
            return
        pipe.receive(received)
        if pipe.session.is_closed:
            self._pipes.pop(key, None)

    def tick(self, now_s: float) -> None:
        """Tick all sessions: a heartbeat interval has passed."""
        for key, pipe in tuple(self._pipes.items()):
            pipe.session.tick(now_s)
            if pipe.session.is_closed:
                del self._pipes[key]

    def close(self, why: str) -> None:
        """Close the session with every router."""
        for pipe in self._pipes.values():
            pipe.session.close(why)
        self._pipes.clear()

    def _new_pipe(self, key: tuple[str, int]) -> WorkerPipe:
        if len(self._pipes) >= ROUTERS_MAX:
            raise ProtocolError(f"{ROUTERS_MAX} routers are known already", param="router")
        router, link = key
        subject = answers_subject(self._namespace, router, link)
        pipe = self._pipes[key] = WorkerPipe(self._publisher, subject, "", self._worker)
        pipe.session = WorkerSession(
            self._limits,
            worker_hello=None,
            wake=pipe.wake,
            on_refused=self._on_refused,
            on_mistake=self._report_mistake,
            budget=self._reading,
        )
        pipe.session.side = SessionLegs(self.leg_server, f"{router}.{link}", pipe.session)
        return pipe

    def _report_mistake(self, message: str, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class _NatsLegServer(LegServer):
    """The registration of a worker; routers reach it once NATS has its subscription."""

    client: Client
    subscribing: "asyncio.Task[Subscription]"

    async def served(self) -> None:
        """Return once NATS has the worker's subscription; raise ConfigError when it does not answer."""
        try:
            await asyncio.shield(self.subscribing)
            await flush_subscriptions(self.client)
        except CLIENT_ERRORS as error:
            raise ConfigError(f"NATS: {self.address} cannot be served: {error}", param="client") from error


class NatsRequestAcceptor:
    """Serves any number of workers of this process over a NATS connection that its caller opens and closes.

    The connection limits in ``limits`` do not apply. ``on_refused`` gets the reason of a refused message.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        limits: WorkerLimits = WORKER_LIMITS,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._client = client
        self._namespace = subject_name(namespace)
        self._auth = message_auth_of(token, self._namespace)
        self._limits = limits
        self._on_refused = on_refused
        self._publisher = PipePublisher(client, self._auth)
        self._reading = ByteBudget(READING_MAX_BYTES)
        self._endpoints: dict[str, _WorkerEndpoint] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._clock = AwakeClock(limits.heartbeat_s)
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the liveness checks of routers."""
        self._checking = spawn(self._check(), name="requests: look after routers")

    async def close(self) -> None:
        """Have every worker leave, and send all pending messages."""
        leg_servers = [endpoint.leg_server for endpoint in self._endpoints.values()]
        for leg_server in leg_servers:
            leg_server.leave("the worker's end of the plane was closed")
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*self._leaving)
        await self._publisher.close()

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return the address for the card of a worker served here."""
        return f"nats://{self._namespace}/{worker_id}/{incarnation}"

    def serve(self, address: str, server: RequestServer) -> _NatsLegServer:
        """Make ``server`` reachable under an address from :meth:`address_of`, until it leaves."""
        if address in self._endpoints:
            raise ConfigError(f"{address} is served already", param="address")
        if self._client.is_closed:
            raise ConfigError("the connection to NATS is closed", param="client")
        words = address.removeprefix("nats://").rsplit("/", 2)
        worker = (WorkerId(int(words[1])), Epoch(int(words[2])))
        leg_server = _NatsLegServer(
            address, server, self._clock, lambda why: self._leave(address, leg_server, why)
        )
        self._endpoints[address] = _WorkerEndpoint(
            leg_server,
            self._publisher,
            self._limits,
            self._reading,
            namespace=self._namespace,
            worker=worker,
            auth=self._auth,
            on_refused=self._on_refused,
        )
        subject = requests_subject(self._namespace, *worker)
        on_message = self._endpoints[address].on_message
        leg_server.client = self._client
        leg_server.subscribing = asyncio.create_task(self._client.subscribe(subject, cb=on_message))
        return leg_server

    def _leave(self, address: str, leg_server: _NatsLegServer, why: str) -> None:
        self._endpoints.pop(address).close(why)
        task = asyncio.create_task(unsubscribe(leg_server.subscribing))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _check(self) -> None:
        while True:
            await tick(self._clock)
            for endpoint in tuple(self._endpoints.values()):
                endpoint.tick(self._clock.now_s)
