"""The router's end of requests over tcp: one connection to every worker that is used or followed."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ssl import SSLContext, SSLError

from kvrouter.core.backoff import Backoff
from kvrouter.core.errors import ConfigError
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.background import spawn
from kvrouter.transports.requests.handshake import Secret
from kvrouter.transports.requests.leg_stream import SessionStream, UnacceptedLegs
from kvrouter.transports.requests.port import AliveSink, LivenessListeners, WorkerUnreachable
from kvrouter.transports.requests.session import (
    ROUTER_LIMITS,
    RouterHello,
    RouterLimits,
    RouterSession,
)
from kvrouter.transports.requests.tcp.pipe import CLOSE_WITHIN_S, TcpAddress, TcpPipe, new_nonce, read_address

RETRY_FIRST_S = 0.1
COMES_BACK_WITHIN_S = 0.1
"""How long a worker with a broken connection counts as alive while a new connection is made."""


class RouterPipe(TcpPipe):
    """A connection to one worker, usable once ``welcomed`` is done."""

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
"""Connect; return a connection after its handshake; raise WorkerUnreachable."""


class TcpLink:
    """One worker address, with at most one connection to it."""

    def __init__(self, connect: Connect, backoff: Backoff, *, on_unused: Callable[[], None]) -> None:
        self._connect = connect
        self._backoff = backoff
        self._on_unused = on_unused
        self._pipe: RouterPipe | None = None
        self._attempt: asyncio.Task[RouterPipe] | None = None
        self._followers = LivenessListeners()
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_alive = True
        self._came_up = asyncio.Event()

    @property
    def is_followed(self) -> bool:
        """Whether the connection is kept open while unused."""
        return bool(self._followers)

    @property
    def open_pipe(self) -> RouterPipe | None:
        """The open connection, if there is one."""
        return None if self._pipe is None or self._pipe.is_closed else self._pipe

    async def connected(self) -> RouterPipe:
        """Return the open connection, or the one that is being made; raise WorkerUnreachable."""
        if self.open_pipe is not None:
            return self.open_pipe
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
        """Keep the connection open for ``sink``; return the function that ends this."""
        forget = self._followers.add(sink)
        if self._reconnecting is None:
            self._reconnecting = spawn(self._stay_connected(), name="requests: stay connected")
        elif not self._is_alive:
            asyncio.get_running_loop().call_soon(self._notify_late)

        def end() -> None:
            forget()
            if not self._followers and self._reconnecting is not None:
                self._reconnecting.cancel()
                self._reconnecting = None
                self._is_alive = True
                self._drop_if_unused()

        return end

    def close(self, reason: str) -> RouterPipe | None:
        """Stop all tasks and close; return the closing connection, so that its last bytes can be awaited."""
        self._followers = LivenessListeners()
        for task in (self._reconnecting, self._attempt):
            if task is not None:
                task.cancel()
        self._reconnecting = None
        if self._pipe is not None:
            self._pipe.close(reason)
        return self._pipe

    async def _try(self) -> RouterPipe:
        pipe = await self._connect()
        pipe.lost.add_done_callback(lambda _: self._lost(pipe))
        self._pipe = pipe
        self._came_up.set()
        return pipe

    def _tried(self, attempt: asyncio.Task[RouterPipe]) -> None:
        self._attempt = None
        if attempt.cancelled() or attempt.exception() is not None:  # the caller has had the error
            self._drop_if_unused()

    def _lost(self, pipe: RouterPipe) -> None:
        if self._pipe is pipe:
            self._pipe = None
            self._came_up.clear()
            self._drop_if_unused()

    def _drop_if_unused(self) -> None:
        if not self._followers and self._pipe is None and self._attempt is None:
            self._on_unused()

    async def _stay_connected(self) -> None:
        n_failed = 0
        while True:
            try:
                pipe = await self.connected()
            except WorkerUnreachable:
                self._notify(is_alive=False)
                n_failed += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._backoff.delay_s(n_failed) * random.uniform(0.5, 1.0)):
                        await self._came_up.wait()
                continue
            n_failed = 0
            self._notify(is_alive=True)
            await asyncio.wait([pipe.lost])
            if not await self._comes_back():
                self._notify(is_alive=False)

    async def _comes_back(self) -> bool:
        """Whether the worker accepts a new connection at once: then only the old connection died."""
        try:
            async with asyncio.timeout(COMES_BACK_WITHIN_S):
                await self.connected()
        except (WorkerUnreachable, TimeoutError):
            return False
        return True

    def _notify(self, *, is_alive: bool) -> None:
        self._is_alive = is_alive
        self._followers.notify(is_alive=is_alive)

    def _notify_late(self) -> None:
        self._followers.notify(is_alive=self._is_alive)


HUNG_UP = "the router closed its connection"


class TcpRequestTransport:
    """The request transport over tcp: one connection for each worker, with any number of streams.

    ``token`` is shared with the workers, ``ssl`` a client's context; ``connect_timeout_s`` limits one
    attempt, handshake included. ``on_refused`` gets a text for every peer that answers but fails the
    handshake.
    """

    def __init__(
        self,
        *,
        token: str | None,
        ssl: SSLContext | None = None,
        limits: RouterLimits = ROUTER_LIMITS,
        connect_timeout_s: float = 2.0,
        retry_most_s: float = 5.0,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._secret = Secret(token)
        self._ssl = ssl
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(RETRY_FIRST_S, retry_most_s)
        self._limits = limits
        self._on_refused = on_refused
        self._links: dict[str, TcpLink] = {}
        self._unaccepted = UnacceptedLegs(limits.open_timeout_s)
        self._is_closed = False

    async def open(self, address: str, request: EngineRequest) -> SessionStream:
        """Send ``request``, once there is a connection. Raises WorkerUnreachable where there is none."""
        begun_s = time.monotonic()
        link = self._link(address)
        pipe = link.open_pipe
        if pipe is None:
            try:
                async with asyncio.timeout(self._limits.open_timeout_s):
                    pipe = await link.connected()
            except TimeoutError:
                raise self._unaccepted.unanswered(address) from None
        return self._opened(pipe, request, begun_s)

    def open_now(self, address: str, request: EngineRequest) -> SessionStream | None:
        """Send ``request``, if there is a connection."""
        pipe = self._link(address).open_pipe
        return None if pipe is None else self._opened(pipe, request, time.monotonic())

    def _opened(self, pipe: RouterPipe, request: EngineRequest, begun_s: float) -> SessionStream:
        session = pipe.session
        session.is_flush_due = True  # so that it is flushed once, below
        try:
            stream = session.open(request, pipe.written_bytes)
        finally:
            pipe.flush()  # what follows need not delay the leg
        self._unaccepted.add(stream, begun_s)
        return stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Keep a connection to the worker at ``address``; call ``on_alive`` when it is lost and restored."""
        return self._link(address).follow(on_alive)

    async def close(self) -> None:
        """Close every connection; open streams break, and the workers are notified."""
        self._is_closed = True
        closing = [link.close(HUNG_UP) for link in tuple(self._links.values())]
        lost = [pipe.lost for pipe in closing if pipe is not None]
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
        """Connect and do the handshake; raise WorkerUnreachable."""
        pipes: list[RouterPipe] = []

        def new_pipe() -> RouterPipe:
            pipe = RouterPipe(
                where,
                self._secret,
                self._limits,
                is_wanted=lambda: self._wants(address),
                on_refused=self._on_refused,
            )
            pipes.append(pipe)
            return pipe

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    new_pipe,
                    where.host,
                    where.port,
                    ssl=self._ssl,
                    server_hostname=None if self._ssl is None else where.host,
                )
                await pipes[-1].welcomed
        except (TimeoutError, OSError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            unreachable = self._unreachable(pipes, f"{address}: cannot connect: {why}")
            if isinstance(error, SSLError):
                self._on_refused(unreachable.message)
            elif isinstance(error, TimeoutError) and pipes and self._ssl is None:
                self._on_refused(f"{address}: connected, and heard nothing: it stands still, or wants TLS")
            raise unreachable from error
        except WorkerUnreachable as refused:
            if pipes[-1].session.was_refused:
                self._on_refused(refused.message)
            raise
        except BaseException:
            self._unreachable(pipes, "the attempt was given up")
            raise
        return pipes[-1]

    def _unreachable(self, pipes: list[RouterPipe], why: str) -> WorkerUnreachable:
        for pipe in pipes:
            pipe.abort(why)
            if pipe.welcomed.done() and not pipe.welcomed.cancelled():
                pipe.welcomed.exception()
        return WorkerUnreachable(why)

    def _wants(self, address: str) -> bool:
        link = self._links.get(address)
        return link is not None and link.is_followed
