"""The workers' listener over tcp, shared by several workers of a process."""

import asyncio
from collections.abc import Callable
from ssl import SSLContext
from typing import NamedTuple

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import advertised_host
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.listener import NO_DESCRIPTOR, Connections, TcpServer
from kvrouter.transports.requests.frames import goodbye
from kvrouter.transports.requests.handshake import Hello, Secret, greeting
from kvrouter.transports.requests.legs import LegServer, SessionLegs
from kvrouter.transports.requests.port import RequestServer
from kvrouter.transports.requests.session import READING_MAX_BYTES
from kvrouter.transports.requests.tcp.pipe import CLOSE_WITHIN_S, TcpAddress, TcpPipe, new_nonce, read_address
from kvrouter.transports.requests.worker_session import (
    WORKER_LIMITS,
    WorkerHello,
    WorkerLimits,
    WorkerSession,
)


class Served(NamedTuple):
    """A worker behind the listener, and its connections from routers."""

    leg_server: LegServer
    pipes: "set[WorkerPipe]"


class WorkerPipe(TcpPipe):
    """A connection from one router to one worker."""

    def __init__(self, acceptor: "TcpRequestAcceptor", secret: Secret) -> None:
        limits = acceptor.limits
        super().__init__(heartbeat_s=limits.heartbeat_s, write_max_bytes=limits.write_max_bytes)
        self._acceptor = acceptor
        self._hello_timer: asyncio.TimerHandle | None = None
        self.session: WorkerSession = WorkerSession(
            limits,
            worker_hello=WorkerHello(secret, new_nonce(), self._admit),
            wake=self.wake,
            on_refused=self._refused,
            on_mistake=self._report_mistake,
            budget=acceptor.reading,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting, and wait for a hello."""
        super().connection_made(transport)
        within_s = self._acceptor.limits.hello_within_s
        late = f"no hello within {within_s:g} s"
        self._hello_timer = self.loop.call_later(within_s, self.session.refuse, late)
        self._acceptor.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, whichever end closed it."""
        self._end_hello_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause the legs: too many bytes wait for the router."""
        self.session.pause()

    def resume_writing(self) -> None:
        """Resume the legs: the router has read."""
        self.session.resume()

    def _admit(self, hello: Hello) -> SessionLegs | str:
        self._end_hello_timer()
        served = self._acceptor.served_by(hello.worker_id, hello.incarnation)
        if not self._acceptor.connections.admit(self):
            refusal = f"{self._acceptor.limits.connections_max} connections are open"
            self._refused(refusal)
            return refusal
        if served is None:
            return f"worker {hello.worker_id}/{hello.incarnation} is not served here"
        served.pipes.add(self)
        self.lost.add_done_callback(lambda _: served.pipes.discard(self))
        router = hello.nonce.hex()  # unique among connections: names this one's legs
        return SessionLegs(served.leg_server, router, self.session)

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _refused(self, reason: str) -> None:
        self._acceptor.on_refused(f"{self.peer}: {reason}")

    def _report_mistake(self, message: str, error: Exception) -> None:
        self.loop.call_exception_handler({"message": message, "exception": error})


class TcpRequestAcceptor:
    """Listens on ``host:port`` (0: any) for routers with ``token``; ``ssl`` is a server's context.

    ``advertise_host`` is the host in addresses, by default ``host``. ``on_refused`` is called with a text for
    every connection that was refused or made a protocol error.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        advertise_host: str | None = None,
        limits: WorkerLimits = WORKER_LIMITS,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._advertised = advertised_host(host, advertise_host)
        self._host = host
        self._port = port
        self._secret = Secret(token)
        self.limits = limits
        self.reading = ByteBudget(READING_MAX_BYTES)
        """Bytes of incomplete requests, over all routers."""
        self.on_refused = on_refused
        self._server = TcpServer(
            lambda: WorkerPipe(self, self._secret),
            answer=lambda: greeting(new_nonce()) + goodbye(NO_DESCRIPTOR),
            on_refused=on_refused,
            ssl=ssl,
            limits=limits,
        )
        self._pipes: set[WorkerPipe] = set()
        self.connections: Connections[WorkerPipe] = Connections(
            lambda pipe: pipe.abort("no hello, and others came"), limits=limits, on_dropped=on_refused
        )
        self._served: dict[tuple[WorkerId, Epoch], Served] = {}
        self._clock = AwakeClock(limits.heartbeat_s)

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        try:
            self._port = await self._server.start(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}", param="port") from error

    @property
    def port(self) -> int:
        """The listening port, once started."""
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

        leg_server = LegServer(address, server, self._clock, leave)
        self._served[key] = Served(leg_server, pipes)
        return leg_server

    async def close(self) -> None:
        """Stop listening, and close all connections. Idempotent."""
        self._server.close()
        await self._server.wait_closed()
        for served in tuple(self._served.values()):
            served.leg_server.leave("the worker was stopped")
        lost = [pipe.lost for pipe in self._pipes]
        for pipe in tuple(self._pipes):
            pipe.close("the worker was stopped")
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)

    def served_by(self, worker_id: WorkerId, incarnation: Epoch) -> Served | None:
        """Return the worker that is served here under these ids."""
        return self._served.get((worker_id, incarnation))

    def arrived(self, pipe: WorkerPipe) -> None:
        """Add a new, unauthenticated connection."""
        self._pipes.add(pipe)
        pipe.lost.add_done_callback(lambda _: self._forget(pipe))
        self.connections.add(pipe, now_s=self._clock.now_s)

    def _forget(self, pipe: WorkerPipe) -> None:
        self._pipes.discard(pipe)
        self.connections.discard(pipe)
