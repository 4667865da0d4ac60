"""The router's end of requests over tcp: a connection to every worker that is used or watched."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ssl import SSLContext, SSLError
from typing import cast
from urllib.parse import urlsplit

from kvrouter.core.backoff import Backoff
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import bracketed
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.background import go_on
from kvrouter.transports.requests.messages import NONCE_BYTES, Secret
from kvrouter.transports.requests.port import AliveSink, LivenessListeners, WorkerUnreachable
from kvrouter.transports.requests.session import (
    LEFT,
    ROUTER_LIMITS,
    RouterHello,
    RouterLimits,
    RouterSession,
    Session,
)
from kvrouter.transports.requests.stream import SessionStream

WRITE_HIGH_BYTES = 256 * 1024
"""Above so many waiting bytes, those that produce more are asked to wait."""

CLOSE_WITHIN_S = 1.0
"""How long the last bytes of a connection may take to leave."""


class TcpPipe(asyncio.Protocol):
    """One connection. All that its session says in one turn of the loop leaves in one write.

    A subclass makes the ``session``, and gives it :meth:`wake`.
    """

    session: Session

    def __init__(self, *, heartbeat_s: float, write_max_bytes: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._heartbeat_s = heartbeat_s
        self._write_max_bytes = write_max_bytes
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self._clock = AwakeClock(heartbeat_s)
        self._beat_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is of no use any more."""
        return self.session.is_closed

    @property
    def peer(self) -> str:
        """Who is at the other end, for words to people."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "somebody"

    @property
    def written_bytes(self) -> int:
        """How many bytes that left the session wait for the peer to read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Take what the peer sent."""
        self.session.receive(data)

    def wake(self) -> None:
        """The session has something to send: it leaves at the end of this turn."""
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:  # it leaves once the connection is there
            return
        data = self.session.take_output()
        if self._is_ending:
            return
        if data:
            transport.write(data)
            if transport.get_write_buffer_size() > self._write_max_bytes:
                self.session.lose(f"the peer left over {self._write_max_bytes} bytes unread")
        if self.session.is_closed:
            self._hang_up(transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there: keep time from now on."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        self._transport = stream
        if self.session.is_closed:  # given up while it was being made
            self._is_ending = True
            stream.abort()
            return
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whichever end closed it."""
        self._is_ending = True
        self.session.lose(LEFT if exc is None else f"{LEFT}: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self, reason: str) -> None:
        """Say why and end, once what was sent before has left. Idempotent."""
        self.session.close(reason)

    def abort(self, reason: str) -> None:
        """End at once: the peer is not expected to read. Idempotent."""
        self.session.lose(reason)
        if self._transport is not None and not self._is_ending:
            self._hang_up(self._transport)

    def _hang_up(self, transport: asyncio.Transport) -> None:
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self.session.is_lost:
            transport.abort()
        else:
            transport.close()
            self._timer = self.loop.call_later(CLOSE_WITHIN_S, transport.abort)

    def _beat(self) -> None:
        now_s = self.loop.time()
        self._clock.advance(now_s - self._beat_s)
        self._beat_s = now_s
        self._timer = self.loop.call_later(self._heartbeat_s, self._beat)
        self.session.tick(self._clock.now_s)


_ID_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """One incarnation of one worker behind a listener that may serve several."""

    host: str
    port: int
    worker_id: WorkerId
    incarnation: Epoch

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}/{self.worker_id}/{self.incarnation}"


def read_address(address: str) -> TcpAddress:
    """Return what ``address`` names; raise ConfigError when it is none of this plane."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        worker_id, incarnation = (int(part) for part in parts.path.removeprefix("/").split("/"))
    except ValueError as error:
        raise _unreadable(address) from error
    if parts.scheme != "tcp" or not host or not port:
        raise _unreadable(address)
    if not (0 <= worker_id < _ID_LIMIT and 0 <= incarnation < _ID_LIMIT):
        raise _unreadable(address)
    return TcpAddress(host, port, WorkerId(worker_id), Epoch(incarnation))


def _unreadable(address: str) -> ConfigError:
    return ConfigError(f"address: {address!r} is not tcp://host:port/worker_id/incarnation", param="address")


def new_nonce() -> bytes:
    """Return a number used once."""
    return secrets.token_bytes(NONCE_BYTES)


COMES_BACK_WITHIN_S = 0.1
"""How long a worker whose connection broke is still taken for alive, while a new one is made."""


class RouterPipe(TcpPipe):
    """A connection to one worker. It may be used once ``welcomed`` is done."""

    def __init__(
        self,
        where: TcpAddress,
        secret: Secret,
        limits: RouterLimits,
        *,
        is_wanted: Callable[[], bool],
        on_refused: Callable[[str], None],
    ) -> None:
        super().__init__(heartbeat_s=limits.heartbeat_s, write_max_bytes=limits.write_max_bytes)
        self.welcomed: asyncio.Future[None] = self.loop.create_future()
        self.session: RouterSession[SessionStream] = RouterSession(
            str(where),
            limits,
            router_hello=RouterHello(secret, new_nonce(), where.worker_id, where.incarnation),
            new_stream=SessionStream,
            wake=self.wake,
            is_wanted=is_wanted,
            on_welcome=self._welcome,
            on_end=self._ended,
            on_refused=on_refused,
        )

    def _welcome(self) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(None)

    def _ended(self, why: str) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(WorkerUnreachable(why))


Connect = Callable[[], Awaitable[RouterPipe]]
"""Return a connection on which the worker welcomed us; raise WorkerUnreachable."""


class TcpLink:
    """One worker address, and at most one connection to it."""

    def __init__(self, connect: Connect, backoff: Backoff, *, on_unused: Callable[[], None]) -> None:
        self._connect = connect
        self._backoff = backoff
        self._on_unused = on_unused
        self._end: RouterPipe | None = None
        self._attempt: asyncio.Task[RouterPipe] | None = None
        self._followers = LivenessListeners()
        self._keeper: asyncio.Task[None] | None = None
        self._is_alive = True
        self._came_up = asyncio.Event()

    @property
    def is_followed(self) -> bool:
        """Whether the connection is kept though nothing is sent."""
        return bool(self._followers)

    async def connected(self) -> RouterPipe:
        """Return the open connection, or the one that is being made; raise WorkerUnreachable."""
        if self._end is not None and not self._end.is_closed:
            return self._end
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._try())
            self._attempt.add_done_callback(self._tried)
        attempt = self._attempt
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if attempt.cancelled() and (task is None or not task.cancelling()):
                raise WorkerUnreachable("the plane was closed") from None
            raise

    def follow(self, sink: AliveSink) -> Callable[[], None]:
        """Keep the connection for ``sink``; return the function that ends it."""
        forget = self._followers.add(sink)
        if self._keeper is None:
            self._keeper = go_on(self._keep(), name="requests: stay connected")
        elif not self._is_alive:
            asyncio.get_running_loop().call_soon(self._notify_late)

        def end() -> None:
            forget()
            if not self._followers and self._keeper is not None:
                self._keeper.cancel()
                self._keeper = None
                self._is_alive = True
                self._drop_if_unused()

        return end

    def close(self, reason: str) -> RouterPipe | None:
        """End everything; return the connection that is closing, for its last bytes to be awaited."""
        self._followers = LivenessListeners()
        for task in (self._keeper, self._attempt):
            if task is not None:
                task.cancel()
        self._keeper = None
        if self._end is not None:
            self._end.close(reason)
        return self._end

    async def _try(self) -> RouterPipe:
        end = await self._connect()
        end.lost.add_done_callback(lambda _: self._lost(end))
        self._end = end
        self._came_up.set()
        return end

    def _tried(self, attempt: asyncio.Task[RouterPipe]) -> None:
        self._attempt = None
        if attempt.cancelled() or attempt.exception() is not None:  # the caller has had the error
            self._drop_if_unused()

    def _lost(self, end: RouterPipe) -> None:
        if self._end is end:
            self._end = None
            self._came_up.clear()
            self._drop_if_unused()

    def _drop_if_unused(self) -> None:
        if not self._followers and self._end is None and self._attempt is None:
            self._on_unused()

    async def _keep(self) -> None:
        n_failed = 0
        while True:
            try:
                end = await self.connected()
            except WorkerUnreachable:
                self._notify(is_alive=False)
                n_failed += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._backoff.delay_s(n_failed) * random.uniform(0.5, 1.0)):
                        await self._came_up.wait()
                continue
            n_failed = 0
            self._notify(is_alive=True)
            await asyncio.wait([end.lost])
            if not await self._comes_back():
                self._notify(is_alive=False)

    async def _comes_back(self) -> bool:
        """Whether the worker takes a new connection at once: then only the old one died, not the worker."""
        try:
            async with asyncio.timeout(COMES_BACK_WITHIN_S):
                await self.connected()
        except (WorkerUnreachable, TimeoutError):
            return False
        return True

    def _notify(self, *, is_alive: bool) -> None:
        self._is_alive = is_alive
        self._followers.tell(is_alive=is_alive)

    def _notify_late(self) -> None:
        self._followers.tell(is_alive=self._is_alive)


HUNG_UP = "the router closed its connection"


class TcpRequestPlane:
    """Reaches workers over tcp: one connection each, however many streams.

    ``token`` is shared with the workers, ``ssl`` a client's context; ``connect_timeout_s`` is the time of one
    try to connect, hello included. ``on_refused`` is given a text for every peer that could not be talked to
    though it answers.
    """

    def __init__(
        self,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        limits: RouterLimits = ROUTER_LIMITS,
        connect_timeout_s: float = 2.0,
        retry_first_s: float = 0.1,
        retry_most_s: float = 5.0,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._secret = Secret(token)
        self._ssl = ssl
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(retry_first_s, retry_most_s)
        self._limits = limits
        self._on_refused = on_refused
        self._links: dict[str, TcpLink] = {}
        self._is_closed = False

    async def open(self, address: str, request: EngineRequest) -> SessionStream:
        """Send ``request``; return once the worker accepted it.

        Raises WorkerUnreachable when it did not in time, and then the worker is asked to forget it; whatever
        else the worker says is raised as it was there.
        """
        stream: SessionStream | None = None
        try:
            async with asyncio.timeout(self._limits.open_timeout_s):
                end = await self._link(address).connected()
                stream = end.session.open(request, end.written_bytes)
                await stream.accepted
        except TimeoutError:
            if stream is not None:
                stream.cancel("the request was not acknowledged in time")
            raise WorkerUnreachable(f"{address} did not answer in {self._limits.open_timeout_s} s") from None
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel("the request was given up while it was sent")
            raise
        return stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep a connection to the worker at ``address``, and notify when it is lost and when it is back."""
        return self._link(address).follow(on_alive)

    async def close(self) -> None:
        """Close every connection; open streams break, and the workers are notified."""
        self._is_closed = True
        closing = [link.close(HUNG_UP) for link in tuple(self._links.values())]
        lost = [end.lost for end in closing if end is not None]
        if lost:
            await asyncio.wait(lost, timeout=2 * CLOSE_WITHIN_S)

    def _link(self, address: str) -> TcpLink:
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

            link = self._links[address] = TcpLink(
                lambda: self._connect(address, where), self._backoff, on_unused=forget
            )
        return link

    async def _connect(self, address: str, where: TcpAddress) -> RouterPipe:
        """Connect and be welcomed; raise WorkerUnreachable."""
        ends: list[RouterPipe] = []

        def new_end() -> RouterPipe:
            end = RouterPipe(
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
            if ends[-1].session.was_refused:
                self._on_refused(refused.message)
            raise
        except BaseException:
            self._unreachable(ends, "the attempt was given up")
            raise
        return ends[-1]

    def _unreachable(self, ends: list[RouterPipe], why: str) -> WorkerUnreachable:
        for end in ends:
            end.abort(why)
            if end.welcomed.done() and not end.welcomed.cancelled():
                end.welcomed.exception()
        return WorkerUnreachable(why)

    def _wants(self, address: str) -> bool:
        link = self._links.get(address)
        return link is not None and link.is_followed
