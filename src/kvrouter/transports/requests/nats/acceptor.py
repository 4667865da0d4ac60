"""The worker's end of requests over NATS."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.background import go_on, tick
from kvrouter.transports.message_auth import MessageAuth, Newest
from kvrouter.transports.nats_client import flush_subscriptions, subject_name
from kvrouter.transports.requests.legs import LegServer, SessionLegs
from kvrouter.transports.requests.nats.plane import (
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
"""Sessions that one worker has with routers; those beyond are not answered."""


class WorkerPipe(NatsPipe):
    """The pipe of one session with one router."""

    session: WorkerSession


class _WorkerEndpoint:
    """One worker's place on NATS: its sessions with routers."""

    def __init__(
        self,
        place: LegServer,
        post: PipePublisher,
        limits: WorkerLimits,
        reading: ByteBudget,
        *,
        namespace: str,
        worker: tuple[WorkerId, Epoch],
        seal: MessageAuth,
        on_refused: Callable[[str], None],
    ) -> None:
        self.place = place
        self._post = post
        self._limits = limits
        self._reading = reading
        self._namespace = namespace
        self._worker = worker
        self._seal = seal
        self._newest = Newest()
        self._on_refused = on_refused
        self._pipes: dict[tuple[str, int], WorkerPipe] = {}

    async def hear(self, message: Msg) -> None:
        """Do what a router says."""
        try:
            number, said = from_router(self._seal, message.subject, message.data)
            key = (said.router, said.link)
            if not self._newest.takes(key, number):
                raise ProtocolError("a router's message came again", param="number")
            pipe = self._pipes.get(key) or self._new_pipe(key)
        except ProtocolError as error:
            self._on_refused(error.message)
            return
        pipe.receive(said)
        if pipe.session.is_closed:
            self._pipes.pop(key, None)

    def tick(self, now_s: float) -> None:
        """A heartbeat has passed."""
        for key, pipe in tuple(self._pipes.items()):
            pipe.session.tick(now_s)
            if pipe.session.is_closed:
                del self._pipes[key]

    def close(self, why: str) -> None:
        """Say goodbye to every router."""
        for pipe in self._pipes.values():
            pipe.session.close(why)
        self._pipes.clear()

    def _new_pipe(self, key: tuple[str, int]) -> WorkerPipe:
        if len(self._pipes) >= ROUTERS_MAX:
            raise ProtocolError(f"{ROUTERS_MAX} routers are known already", param="router")
        router, link = key
        subject = answers_subject(self._namespace, router, link)
        pipe = self._pipes[key] = WorkerPipe(self._post, subject, "", self._worker)
        pipe.session = WorkerSession(
            self._limits,
            worker_hello=None,
            wake=pipe.wake,
            on_refused=self._on_refused,
            on_mistake=self._mistaken,
            budget=self._reading,
        )
        pipe.session.side = SessionLegs(self.place, f"{router}.{link}", pipe.session)
        return pipe

    def _mistaken(self, message: str, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class _NatsLegServer(LegServer):
    """A place that routers reach once NATS knows of its subscription."""

    client: Client
    subscribing: "asyncio.Task[Subscription]"

    async def served(self) -> None:
        """Return once NATS knows that the worker listens; raise ConfigError when it does not answer."""
        try:
            await asyncio.shield(self.subscribing)
            await flush_subscriptions(self.client)
        except (NatsError, OSError) as error:
            raise ConfigError(f"NATS: {self.address} cannot be served: {error}", param="client") from error


class NatsRequestAcceptor:
    """Serves any number of workers of this process over a NATS connection that its caller made and closes.

    Of ``limits`` those of connections say nothing here. ``on_refused`` hears why a message was not taken.
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
        self._seal = message_auth_of(token, self._namespace)
        self._limits = limits
        self._on_refused = on_refused
        self._post = PipePublisher(client, self._seal)
        self._reading = ByteBudget(READING_MAX_BYTES)
        self._endpoints: dict[str, _WorkerEndpoint] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._clock = AwakeClock(limits.heartbeat_s)
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch over the routers."""
        self._checking = go_on(self._check(), name="requests: look after routers")

    async def close(self) -> None:
        """Every worker leaves; what was said is sent."""
        places = [endpoint.place for endpoint in self._endpoints.values()]
        for place in places:
            place.leave("the worker's end of the plane was closed")
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*self._leaving)
        await self._post.close()

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return what the card of a worker served here says."""
        return f"nats://{self._namespace}/{worker_id}/{incarnation}"

    def serve(self, address: str, server: RequestServer) -> _NatsLegServer:
        """Make ``server`` reachable under an address that :meth:`address_of` gave, until it leaves."""
        if address in self._endpoints:
            raise ConfigError(f"{address} is served already", param="address")
        if self._client.is_closed:
            raise ConfigError("the connection to NATS is closed", param="client")
        words = address.removeprefix("nats://").rsplit("/", 2)
        worker = (WorkerId(int(words[1])), Epoch(int(words[2])))
        place = _NatsLegServer(address, server, self._clock, lambda why: self._leave(address, place, why))
        self._endpoints[address] = _WorkerEndpoint(
            place,
            self._post,
            self._limits,
            self._reading,
            namespace=self._namespace,
            worker=worker,
            seal=self._seal,
            on_refused=self._on_refused,
        )
        subject = requests_subject(self._namespace, *worker)
        hear = self._endpoints[address].hear
        place.client = self._client
        place.subscribing = asyncio.create_task(self._client.subscribe(subject, cb=hear))
        return place

    def _leave(self, address: str, place: _NatsLegServer, why: str) -> None:
        self._endpoints.pop(address).close(why)
        task = asyncio.create_task(self._unsubscribe(place.subscribing))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _unsubscribe(self, subscribing: asyncio.Task[Subscription]) -> None:
        with suppress(NatsError, OSError):  # where the connection is gone, the subscription is too
            await (await subscribing).unsubscribe()

    async def _check(self) -> None:
        while True:
            await tick(self._clock)
            for endpoint in tuple(self._endpoints.values()):
                endpoint.tick(self._clock.now_s)
