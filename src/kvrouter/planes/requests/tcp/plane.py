"""The router's side: a connection to every worker that is asked or watched."""

import asyncio
from collections.abc import Callable
from ssl import SSLContext, SSLError

from kvrouter.core.errors import ConfigError
from kvrouter.core.requests import EngineRequest
from kvrouter.planes.requests.port import AliveSink, WorkerUnreachable
from kvrouter.planes.requests.tcp.address import TcpAddress, read_address
from kvrouter.planes.requests.tcp.connection import CLOSE_WITHIN_S, UNREAD_MAX_BYTES
from kvrouter.planes.requests.tcp.hello import Secret
from kvrouter.planes.requests.tcp.link import Backoff, Link
from kvrouter.planes.requests.tcp.router_end import RouterEnd, RouterLimits
from kvrouter.planes.requests.tcp.stream import TcpStream

HUNG_UP = "the router closed its connection"


class TcpRequestPlane:
    """Reaches workers over tcp: one connection each, however many streams.

    ``token`` is shared with the workers, ``ssl`` a client's context; ``open_timeout_s`` is the time in which
    a worker must have taken a leg, ``connect_timeout_s`` that of one try to connect, hello included. A peer
    that was not heard for ``dead_after_s`` is lost; one that has nothing to say is asked every
    ``heartbeat_s``. A stream holds ``stream_credit_tokens`` at most, and is cancelled when its reader took
    nothing for ``slow_stream_limit_s``. A connection has ``streams_max`` streams; while requests wait there
    that fill half of ``write_max_bytes``, the worker counts as full. A connection that nobody watches or uses
    is closed after ``idle_close_s``. ``on_refused`` is told, in words, of every peer that could not be talked
    to though it answers.
    """

    def __init__(
        self,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        open_timeout_s: float = 5.0,
        connect_timeout_s: float = 2.0,
        heartbeat_s: float = 2.0,
        dead_after_s: float = 6.0,
        slow_stream_limit_s: float = 60.0,
        idle_close_s: float = 60.0,
        retry_first_s: float = 0.1,
        retry_most_s: float = 5.0,
        stream_credit_tokens: int = 1024,
        streams_max: int = 8192,
        write_max_bytes: int = UNREAD_MAX_BYTES,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        if stream_credit_tokens < 1:
            raise ConfigError("stream_credit_tokens: must be at least 1", param="stream_credit_tokens")
        self._secret = Secret(token)
        self._ssl = ssl
        self._open_timeout_s = open_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(retry_first_s, retry_most_s)
        self._limits = RouterLimits(
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            slow_stream_limit_s=slow_stream_limit_s,
            idle_close_s=idle_close_s,
            stream_credit_tokens=stream_credit_tokens,
            streams_max=streams_max,
            write_max_bytes=write_max_bytes,
        )
        self._on_refused = on_refused
        self._links: dict[str, Link] = {}
        self._is_closed = False

    async def open(self, address: str, request: EngineRequest) -> TcpStream:
        """Send ``request``; return once the worker accepted it.

        Raises WorkerUnreachable when it did not in time, and then the worker is told to forget it; whatever
        else the worker says is raised as it was there.
        """
        stream: TcpStream | None = None
        try:
            async with asyncio.timeout(self._open_timeout_s):
                end = await self._link(address).connected()
                stream = end.open(request)
                await stream.accepted
        except TimeoutError:
            if stream is not None:
                stream.cancel("the request was not acknowledged in time")
            raise WorkerUnreachable(f"{address} did not answer in {self._open_timeout_s} s") from None
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel("the request was given up while it was sent")
            raise
        return stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep a connection to the worker at ``address``, and tell when it is lost and when it is back."""
        return self._link(address).follow(on_alive)

    async def close(self) -> None:
        """Close every connection; open streams break, and the workers are told."""
        self._is_closed = True
        closing = [link.close(HUNG_UP) for link in tuple(self._links.values())]
        lost = [end.lost for end in closing if end is not None]
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)

    def _link(self, address: str) -> Link:
        if self._is_closed:
            raise WorkerUnreachable("the plane was closed")
        link = self._links.get(address)
        if link is None:
            try:
                where = read_address(address)
            except ConfigError as error:
                raise WorkerUnreachable(error.message) from error

            def forget() -> None:
                if self._links.get(address) is link:
                    del self._links[address]

            link = self._links[address] = Link(
                lambda: self._connect(address, where), self._backoff, on_unused=forget
            )
        return link

    async def _connect(self, address: str, where: TcpAddress) -> RouterEnd:
        """Connect and be welcomed; raise WorkerUnreachable."""
        ends: list[RouterEnd] = []

        def new_end() -> RouterEnd:
            end = RouterEnd(
                where,
                self._secret,
                self._limits,
                is_wanted=lambda: self._wants(address),
                on_refused=self._on_refused,
            )
            ends.append(end)
            return end

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    new_end,
                    where.host,
                    where.port,
                    ssl=self._ssl,
                    server_hostname=None if self._ssl is None else where.host,
                )
                await ends[-1].welcomed
        except (TimeoutError, OSError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            unreachable = self._unreachable(ends, f"{address}: cannot connect: {why}")
            if isinstance(error, SSLError):
                self._on_refused(unreachable.message)
            elif isinstance(error, TimeoutError) and ends and self._ssl is None:
                self._on_refused(f"{address}: connected, and heard nothing: it stands still, or wants TLS")
            raise unreachable from error
        except WorkerUnreachable as refused:
            if ends[-1].was_refused:
                self._on_refused(refused.message)
            raise
        except BaseException:
            self._unreachable(ends, "the attempt was given up")
            raise
        return ends[-1]

    def _unreachable(self, ends: list[RouterEnd], why: str) -> WorkerUnreachable:
        for end in ends:
            end.abort(why)
            if end.welcomed.done() and not end.welcomed.cancelled():
                end.welcomed.exception()
        return WorkerUnreachable(why)

    def _wants(self, address: str) -> bool:
        link = self._links.get(address)
        return link is not None and link.is_followed
