"""The workers' listener over tcp; several workers of a process share it."""

import asyncio
import sys
from collections.abc import Callable
from ssl import SSLContext
from typing import NamedTuple

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import advertised_host
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.listener import (
    HELLO_WITHIN_S,
    NO_DESCRIPTOR,
    UNAUTHENTICATED_MAX,
    TcpServer,
    UnauthenticatedConnections,
)
from kvrouter.transports.requests.legs import LegServer, SessionLegs
from kvrouter.transports.requests.messages import Hello, Secret, goodbye, greeting
from kvrouter.transports.requests.port import RequestServer
from kvrouter.transports.requests.session import READING_MAX_BYTES, STREAMS_MAX, UNREAD_MAX_BYTES
from kvrouter.transports.requests.tcp.plane import (
    CLOSE_WITHIN_S,
    TcpAddress,
    TcpPipe,
    new_nonce,
    read_address,
)
from kvrouter.transports.requests.worker_session import WorkerHello, WorkerLimits, WorkerSession

ROUTERS_MAX = 1024
"""Routers that may be connected to one listener."""


class Served(NamedTuple):
    """A worker behind the listener, and the connections that routers have to it."""

    place: LegServer
    pipes: "set[WorkerPipe]"


class WorkerPipe(TcpPipe):
    """A connection from one router to one worker."""

    def __init__(self, acceptor: "TcpRequestAcceptor", secret: Secret, limits: WorkerLimits) -> None:
        super().__init__(heartbeat_s=limits.heartbeat_s, write_max_bytes=acceptor.write_max_bytes)
        self._acceptor = acceptor
        self._hello_timer: asyncio.TimerHandle | None = None
        self.session: WorkerSession = WorkerSession(
            limits,
            worker_hello=WorkerHello(secret, new_nonce(), self._admit),
            wake=self.wake,
            on_refused=self._refused,
            on_mistake=self._mistaken,
            budget=acceptor.reading,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, and wait for a hello."""
        super().connection_made(transport)
        within_s = self._acceptor.hello_within_s
        late = f"no hello within {within_s:g} s"
        self._hello_timer = self.loop.call_later(within_s, self.session.refuse, late)
        self._acceptor.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whichever end closed it."""
        self._end_hello_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More bytes wait for the router than should."""
        self.session.choke()

    def resume_writing(self) -> None:
        """The router has read on."""
        self.session.go_on()

    def _admit(self, said: Hello) -> SessionLegs | str:
        self._end_hello_timer()
        served = self._acceptor.served_by(said.worker_id, said.incarnation)
        refusal = self._acceptor.admit(self)
        if refusal is not None:
            self._refused(refusal)
            return refusal
        if served is None:
            return f"worker {said.worker_id}/{said.incarnation} is not served here"
        served.pipes.add(self)
        self.lost.add_done_callback(lambda _: served.pipes.discard(self))
        router = said.nonce.hex()  # what its legs are called by: no other connection has it
        return SessionLegs(served.place, router, self.session)

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _refused(self, reason: str) -> None:
        self._acceptor.on_refused(f"{self.peer}: {reason}")

    def _mistaken(self, message: str, error: Exception) -> None:
        self.loop.call_exception_handler({"message": message, "exception": error})


class TcpRequestAcceptor:
    """Listens on ``host:port`` (0: any) for routers that know ``token``; ``ssl`` is a server's context.

    ``advertise_host`` is the host that goes into addresses, where it is not ``host``. A router must say hello
    within ``hello_within_s``; of connections that have not there are ``unauthenticated_max``: where one more
    comes the oldest is dropped, so that nobody without the token keeps routers out. A router is lost when
    nothing was heard of it for ``dead_after_s``, and asked every ``heartbeat_s`` when nothing else is said.
    ``connections_max`` routers may be connected, each with ``streams_max`` legs and ``write_max_bytes`` that
    it has not read; file descriptors from the number ``descriptors_max`` on are not for connections.
    ``on_refused`` is given a text for every connection that was turned away or did what the protocol does
    not allow.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        advertise_host: str | None = None,
        hello_within_s: float = HELLO_WITHIN_S,
        heartbeat_s: float = 2.0,
        dead_after_s: float = 6.0,
        connections_max: int = ROUTERS_MAX,
        descriptors_max: int = sys.maxsize,
        unauthenticated_max: int = UNAUTHENTICATED_MAX,
        streams_max: int = STREAMS_MAX,
        write_max_bytes: int = UNREAD_MAX_BYTES,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._advertised = advertised_host(host, advertise_host)
        self._host = host
        self._port = port
        self._secret = Secret(token)
        self._limits = WorkerLimits(
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            streams_max=streams_max,
        )
        self.hello_within_s = hello_within_s
        self.write_max_bytes = write_max_bytes
        self.reading = ByteBudget(READING_MAX_BYTES)
        """What arrived in part of requests, of all routers."""
        self._connections_max = connections_max
        self.on_refused = on_refused
        self._server = TcpServer(
            lambda: WorkerPipe(self, self._secret, self._limits),
            answer=lambda: greeting(new_nonce()) + goodbye(NO_DESCRIPTOR),
            on_refused=on_refused,
            ssl=ssl,
            handshake_timeout_s=hello_within_s,
            descriptors_max=descriptors_max,
        )
        self._pipes: set[WorkerPipe] = set()
        self._known: set[WorkerPipe] = set()
        self._unauthenticated: UnauthenticatedConnections[WorkerPipe] = UnauthenticatedConnections(
            lambda pipe: pipe.abort("no hello, and others came"),
            at_most=unauthenticated_max,
            on_dropped=on_refused,
        )
        self._served: dict[tuple[WorkerId, Epoch], Served] = {}
        self._clock = AwakeClock(heartbeat_s)

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        try:
            self._port = await self._server.start(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}", param="port") from error

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._port

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return the address for a worker's card. Raises ConfigError before :meth:`start` on any port."""
        if not self._port:
            raise ConfigError("port: is not known before the acceptor was started", param="port")
        return str(TcpAddress(self._advertised, self._port, worker_id, incarnation))

    def serve(self, address: str, server: RequestServer) -> LegServer:
        """Make ``server`` reachable under ``address`` until the registration leaves; ConfigError."""
        where = read_address(address)
        key = (where.worker_id, where.incarnation)
        if key in self._served:
            raise ConfigError(f"{address} is served already", param="address")
        pipes: set[WorkerPipe] = set()

        def leave(why: str) -> None:
            del self._served[key]
            for pipe in tuple(pipes):
                pipe.close(why)

        place = LegServer(address, server, self._clock, leave)
        self._served[key] = Served(place, pipes)
        return place

    async def close(self) -> None:
        """Take no more connections, and close those that are there. Idempotent."""
        self._server.close()
        await self._server.wait_closed()
        for served in tuple(self._served.values()):
            served.place.leave("the worker was stopped")
        lost = [pipe.lost for pipe in self._pipes]
        for pipe in tuple(self._pipes):
            pipe.close("the worker was stopped")
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)

    def served_by(self, worker_id: WorkerId, incarnation: Epoch) -> Served | None:
        """Return the worker that is served here under that name."""
        return self._served.get((worker_id, incarnation))

    def arrived(self, pipe: WorkerPipe) -> None:
        """A connection was made; nobody knows whose."""
        self._pipes.add(pipe)
        pipe.lost.add_done_callback(lambda _: self._forget(pipe))
        self._unauthenticated.add(pipe, now_s=self._clock.now_s)

    def admit(self, pipe: WorkerPipe) -> str | None:
        """Count a connection from a router; return why there is no place for it."""
        self._unauthenticated.discard(pipe)
        if len(self._known) >= self._connections_max:
            return f"{self._connections_max} connections are open"
        self._known.add(pipe)
        return None

    def _forget(self, pipe: WorkerPipe) -> None:
        self._pipes.discard(pipe)
        self._known.discard(pipe)
        self._unauthenticated.discard(pipe)
