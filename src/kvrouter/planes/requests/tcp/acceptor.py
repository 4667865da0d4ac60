"""The workers' side: one listener, behind which several workers of a process may be served."""

import asyncio
from collections.abc import Callable
from ssl import SSLContext

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import told_host
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.legs import LegKey
from kvrouter.planes.requests.port import RequestServer
from kvrouter.planes.requests.tcp.address import TcpAddress, read_address
from kvrouter.planes.requests.tcp.connection import CLOSE_WITHIN_S
from kvrouter.planes.requests.tcp.hello import Secret
from kvrouter.planes.requests.tcp.worker_end import WorkerEnd, WorkerLimits

BACKLOG = 1024


class TcpRegistration:
    """One worker's place behind the listener, from :meth:`TcpRequestAcceptor.serve` until it leaves."""

    def __init__(self, address: str, server: RequestServer, *, on_leave: Callable[[], None]) -> None:
        self.address = address
        self.server = server
        self._on_leave = on_leave
        self._ends: set[WorkerEnd] = set()
        self._keys: set[LegKey] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running_legs(self) -> int:
        """How many legs run here, those that are being accepted included."""
        return len(self._keys)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, or ``limit_s`` seconds; return whether none does."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def leave(self, why: str) -> None:
        """The worker is gone: open streams break, new ones are refused. Idempotent."""
        self._on_leave()
        for end in tuple(self._ends):
            end.close(why)

    def join(self, end: WorkerEnd) -> None:
        """A router's connection was welcomed."""
        self._ends.add(end)

    def part(self, end: WorkerEnd) -> None:
        """A router's connection is of no use any more."""
        self._ends.discard(end)

    def begin(self, key: LegKey) -> bool:
        """Count a leg; False when it is open already, over any connection."""
        if key in self._keys:
            return False
        self._keys.add(key)
        self._idle.clear()
        return True

    def over(self, key: LegKey) -> None:
        """A leg runs no longer."""
        self._keys.discard(key)
        if not self._keys:
            self._idle.set()


class TcpRequestAcceptor:
    """Listens on ``host:port`` (0: any) for routers that know ``token``; ``ssl`` is a server's context.

    ``advertise_host`` is the host that goes into addresses, where it is not ``host``. A router must say hello
    within ``hello_within_s``; it is lost when nothing was heard of it for ``dead_after_s``, and asked every
    ``heartbeat_s`` when nothing else is said. ``connections_max`` routers may be connected, each with
    ``streams_max`` legs and ``write_max_bytes`` that it has not read. ``on_refused`` is told, in words, of
    every connection that was turned away or did what the protocol does not allow.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        advertise_host: str | None = None,
        hello_within_s: float = 5.0,
        heartbeat_s: float = 2.0,
        dead_after_s: float = 6.0,
        connections_max: int = 1024,
        streams_max: int = 8192,
        write_max_bytes: int = 128 * 1024 * 1024,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._advertised = told_host(host, advertise_host)
        self._host = host
        self._port = port
        self._secret = Secret(token)
        self._ssl = ssl
        self._limits = WorkerLimits(
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            hello_within_s=hello_within_s,
            streams_max=streams_max,
            write_max_bytes=write_max_bytes,
        )
        self._connections_max = connections_max
        self._on_refused = on_refused
        self._listener: asyncio.Server | None = None
        self._ends: set[WorkerEnd] = set()
        self._registrations: dict[tuple[WorkerId, Epoch], TcpRegistration] = {}

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._new_end,
                self._host,
                self._port,
                ssl=self._ssl,
                ssl_handshake_timeout=None if self._ssl is None else self._limits.hello_within_s,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}", param="port") from error
        self._port = int(self._listener.sockets[0].getsockname()[1])

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._port

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return the address for a worker's card. Raises ConfigError before :meth:`start` on any port."""
        if not self._port:
            raise ConfigError("port: is not known before the acceptor was started", param="port")
        return str(TcpAddress(self._advertised, self._port, worker_id, incarnation))

    def serve(self, address: str, server: RequestServer) -> TcpRegistration:
        """Make ``server`` reachable under ``address`` until the registration leaves; ConfigError."""
        where = read_address(address)
        key = (where.worker_id, where.incarnation)
        if key in self._registrations:
            raise ConfigError(f"{address} is served already", param="address")

        def leave() -> None:
            if self._registrations.get(key) is registration:
                del self._registrations[key]

        registration = self._registrations[key] = TcpRegistration(address, server, on_leave=leave)
        return registration

    async def close(self) -> None:
        """Take no more connections, and close those that are there. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for registration in tuple(self._registrations.values()):
            registration.leave("the worker was stopped")
        lost = [end.lost for end in self._ends]
        for end in tuple(self._ends):
            end.close("the worker was stopped")
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None

    def _new_end(self) -> WorkerEnd:
        return WorkerEnd(
            self._secret,
            self._limits,
            find=lambda worker_id, incarnation: self._registrations.get((worker_id, incarnation)),
            on_refused=self._on_refused,
            admit=self._admit,
        )

    def _admit(self, end: WorkerEnd) -> str | None:
        """Count a connection; return why there is no place for it."""
        self._ends.add(end)
        end.lost.add_done_callback(lambda _: self._ends.discard(end))
        if len(self._ends) > self._connections_max:
            return f"{self._connections_max} connections are open"
        return None
