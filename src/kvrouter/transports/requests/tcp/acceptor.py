"""The workers' listener over tcp; several workers of a process share it."""

import asyncio
import sys
from collections.abc import Callable
from ssl import SSLContext

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import told_host
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.listener import (
    HELLO_WITHIN_S,
    NO_DESCRIPTOR,
    UNAUTHENTICATED_MAX,
    TcpServer,
    UnauthenticatedConnections,
)
from kvrouter.transports.requests.legs import AwakeClock, LegServer
from kvrouter.transports.requests.port import RequestServer
from kvrouter.transports.requests.tcp.connection import CLOSE_WITHIN_S, UNREAD_MAX_BYTES
from kvrouter.transports.requests.tcp.frames import (
    Secret,
    TcpAddress,
    goodbye,
    greeting,
    new_nonce,
    read_address,
)
from kvrouter.transports.requests.tcp.worker_end import Served, WorkerEnd, WorkerLimits

ROUTERS_MAX = 1024
"""Routers that may be connected to one listener."""


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
        streams_max: int = 8192,
        write_max_bytes: int = UNREAD_MAX_BYTES,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._advertised = told_host(host, advertise_host)
        self._host = host
        self._port = port
        self._secret = Secret(token)
        self._limits = WorkerLimits(
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            hello_within_s=hello_within_s,
            streams_max=streams_max,
            write_max_bytes=write_max_bytes,
        )
        self._connections_max = connections_max
        self._on_refused = on_refused
        self._server = TcpServer(
            self._new_end,
            answer=lambda: greeting(new_nonce()) + goodbye(NO_DESCRIPTOR),
            on_refused=on_refused,
            ssl=ssl,
            handshake_timeout_s=hello_within_s,
            descriptors_max=descriptors_max,
        )
        self._ends: set[WorkerEnd] = set()
        self._known: set[WorkerEnd] = set()
        self._unauthenticated: UnauthenticatedConnections[WorkerEnd] = UnauthenticatedConnections(
            lambda end: end.abort("no hello, and others came"),
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
        ends: set[WorkerEnd] = set()

        def leave(why: str) -> None:
            del self._served[key]
            for end in tuple(ends):
                end.close(why)

        place = LegServer(address, server, self._clock, leave)
        self._served[key] = Served(place, ends)
        return place

    async def close(self) -> None:
        """Take no more connections, and close those that are there. Idempotent."""
        self._server.close()
        await self._server.wait_closed()
        for served in tuple(self._served.values()):
            served.place.leave("the worker was stopped")
        lost = [end.lost for end in self._ends]
        for end in tuple(self._ends):
            end.close("the worker was stopped")
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)

    def _new_end(self) -> WorkerEnd:
        return WorkerEnd(
            self._secret,
            self._limits,
            find=lambda worker_id, incarnation: self._served.get((worker_id, incarnation)),
            on_refused=self._on_refused,
            counter=self,
        )

    def arrived(self, end: WorkerEnd) -> None:
        """A connection was made; nobody knows whose."""
        self._ends.add(end)
        end.lost.add_done_callback(lambda _: self._forget(end))
        self._unauthenticated.add(end, now_s=self._clock.now_s)

    def admit(self, end: WorkerEnd) -> str | None:
        """Count a connection from a router; return why there is no place for it."""
        self._unauthenticated.discard(end)
        if len(self._known) >= self._connections_max:
            return f"{self._connections_max} connections are open"
        self._known.add(end)
        return None

    def _forget(self, end: WorkerEnd) -> None:
        self._ends.discard(end)
        self._known.discard(end)
        self._unauthenticated.discard(end)
