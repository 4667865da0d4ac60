"""The HTTP server: listens, checks its connections' timeouts, and drains."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.clock import AwakeClock
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.protocol import Handler, HttpEvent, HttpProtocol
from kvrouter.frontend.http.response import (
    CONNECTIONS_FULL,
    UPLOAD_TOO_SLOW,
    UPLOADS_FULL,
    BadRequest,
    DateHeader,
    Disconnect,
    ErrorAnswer,
    Request,
    Responder,
    error_answer,
    refusal_bytes,
)
from kvrouter.telemetry import Event as LogEvent
from kvrouter.telemetry import log_event
from kvrouter.telemetry.logs import LogThrottle
from kvrouter.transports.listener import NO_DESCRIPTOR, Listener

__all__ = ["HttpServer", "Observer"]

Observer: TypeAlias = Callable[[HttpEvent], None]
"""Called with each event to count."""

BACKLOG = 2048
"""The most connections that wait to be accepted."""

_log = logging.getLogger("kvrouter.frontend.http")
_COUNTED = {
    CONNECTIONS_FULL: HttpEvent.CONNECTION_REFUSED,
    UPLOADS_FULL: HttpEvent.UPLOADS_FULL,
    UPLOAD_TOO_SLOW: HttpEvent.UPLOAD_TOO_SLOW,
}
_LOGGED = {
    CONNECTIONS_FULL: LogEvent.HTTP_CONNECTIONS_FULL,
    UPLOADS_FULL: LogEvent.HTTP_UPLOADS_FULL,
}


FaultAnswerer: TypeAlias = Callable[[BadRequest], ErrorAnswer]
"""Called with each request that no handler answers; returns the answer."""


def _observe_nothing(_: HttpEvent) -> None:
    pass


class Sweep:
    """Calls ``look`` every ``every_s`` seconds with the loop's time and that of an :class:`AwakeClock`.
    After a stall of the loop it skips one call, so that bytes received meanwhile are read first.
    """

    def __init__(self, every_s: float, look: Callable[[float, float], None]) -> None:
        self._look = look
        self._awake = AwakeClock(every_s)
        self._due_s = 0.0
        self._is_put_off = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer. Idempotent."""
        if self._timer is None:
            self._await(loop)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _await(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + self._awake.every_s
        self._timer = loop.call_at(self._due_s, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        stood_still = self._awake.advance(now_s - self._due_s + self._awake.every_s)
        self._is_put_off = stood_still and not self._is_put_off
        if not self._is_put_off:
            self._look(now_s, self._awake.now_s)
        self._await(loop)


class HttpServer:
    """Serves ``handler`` over HTTP/1.1 and 1.0: a task per request, one request at a time per connection.

    When a handler raises, or returns before its answer has ended, the client gets a 500; if the answer has
    started, the connection is cut, so that it does not look complete. A handler is not cancelled when its
    client disconnects: it is notified (:class:`Responder`). Only ``drain`` cancels handlers, at its end.

    ``on_refused`` answers requests and connections that are refused before a handler, ``on_failed`` requests
    whose handler failed before its answer started.
    """

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        *,
        observer: Observer = _observe_nothing,
        on_refused: FaultAnswerer = error_answer,
        on_failed: FaultAnswerer = error_answer,
    ) -> None:
        self._handler = handler
        self.limits = Limits() if limits is None else limits
        """The limits of every connection."""
        self.observe = observer
        self._listeners: list[Listener] = []
        self._arriving: set[asyncio.Task[object]] = set()
        self._on_refused = on_refused
        self.failed = on_failed
        self._connections: set[HttpProtocol] = set()
        self._served = 0  # accepted connections, also those not opened yet
        self._refused_connections: set[HttpProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unflushed: list[HttpProtocol] = []
        self.uploads = ByteBudget(self.limits.uploads_bytes)
        """The memory budget of requests without a handler yet."""
        self._throttle = LogThrottle()
        self._date = DateHeader()
        self._sweep = Sweep(self.limits.sweep_s, self._sweep_all)
        self._quiet = asyncio.Event()
        self.is_draining = False
        """Whether every answer must end its connection."""

    async def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        sockets: Sequence[socket.socket] | None = None,
    ) -> None:
        """Start to accept on ``host:port`` (port 0: any free one), or on bound ``sockets``; return at once.

        Raises OSError when the address cannot be bound, RuntimeError after ``drain``.
        """
        if self.is_draining:
            raise RuntimeError("this server has drained")
        self._loop = asyncio.get_running_loop()
        if sockets is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets = [socket.create_server((host, port), family=family)]
        for sock in sockets:
            sock.listen(BACKLOG)
            # connections inherit it, also on an event loop that does not set it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._listeners.append(Listener(sock, loop=self._loop, take=self._take, answer=self._turn_away))
        self._sweep.start(self._loop)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The (host, port) of every listening socket."""
        return [listener.address for listener in self._listeners]

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def running(self) -> int:
        """The number of running handlers."""
        return len(self._tasks)

    async def drain(self, limit_s: float) -> int:
        """Stop accepting, wait up to ``limit_s`` seconds for running requests, then cut their connections.

        Return how many connections were cut. Their handlers are notified (``Disconnect.DRAIN_CUT``) and
        cancelled after ``Limits.handler_grace_s`` more. Idle connections close at once, busy ones after
        their answer; a partly received request is still served.
        """
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        if self._arriving:
            await asyncio.wait(self._arriving)
        for connection in list(self._connections):
            connection.drain()
        await self._wait_quiet(limit_s)
        cut = list(self._connections)
        for connection in cut:
            connection.cut(Disconnect.DRAIN_CUT)
        if not await self._wait_quiet(self.limits.handler_grace_s):
            for task in self._tasks:
                task.cancel()
            await self._wait_quiet(self.limits.handler_grace_s)
        self._sweep.stop()
        self._listeners.clear()
        return len(cut)

    # Called by connections.

    def opened(self, connection: HttpProtocol) -> None:
        """Register an open connection; ``closed`` will follow."""
        self._connections.add(connection)

    def closed(self, connection: HttpProtocol) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)
        if connection in self._refused_connections:
            self._refused_connections.remove(connection)
        else:
            self._served -= 1
        self.observe(HttpEvent.CONNECTION_CLOSED)
        self._note_quiet()

    def handle(self, request: Request, responder: Responder) -> "asyncio.Task[None]":
        """Start the handler in a task."""
        task = self._loop.create_task(self._handler(request, responder))
        self._tasks.add(task)
        task.add_done_callback(self._handled)
        return task

    def flush_soon(self, connection: HttpProtocol) -> None:
        """Schedule ``connection.flush`` to run before the event loop next waits."""
        if not self._unflushed:
            self._loop.call_soon(self._flush_all)
        self._unflushed.append(connection)

    def date_line(self) -> bytes:
        """Return the Date header line of this second."""
        return self._date.line(time.time())

    def refused(self, fault: BadRequest) -> ErrorAnswer:
        """Count and log (throttled) a request that is refused before a handler; return the answer."""
        self.observe(_COUNTED.get(fault.code, HttpEvent.BAD_REQUEST))
        if self._throttle.allows(f"{fault.status} {fault.code} {fault.reason}"):
            event = _LOGGED.get(fault.code, LogEvent.HTTP_BAD_REQUEST)
            log_event(_log, event, status=fault.status, code=fault.code, reason=fault.reason)
        return self._on_refused(fault)

    def _take(self, sock: socket.socket) -> None:
        """Serve a connection, or refuse it; a refused one lingers unless too many others do."""
        refusal = self._refusal(sock.fileno())
        if refusal is not None and len(self._refused_connections) >= self.limits.refused_connections:
            self._refuse(sock, refusal)
            return
        answer = None if refusal is None else self._answer_of(refusal)
        connection = HttpProtocol(self, self._loop, refusal=answer)
        if refusal is None:
            self._served += 1
            self.observe(HttpEvent.CONNECTION_OPENED)
        else:
            self._refused_connections.add(connection)
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, sock)
        )
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, connection, sock))

    def _arrived(self, connection: HttpProtocol, sock: socket.socket, task: "asyncio.Task[object]") -> None:
        self._arriving.discard(task)
        if task.cancelled() or task.exception() is not None:
            sock.close()
            self.closed(connection)

    def _turn_away(self, sock: socket.socket) -> None:
        """Refuse a connection because no file descriptor is left."""
        self._refuse(sock, BadRequest(503, NO_DESCRIPTOR, CONNECTIONS_FULL))

    def _refusal(self, descriptor: int) -> BadRequest | None:
        if self._served >= self.limits.connections:
            return BadRequest(503, f"{self.limits.connections} connections are open", CONNECTIONS_FULL)
        if descriptor >= self.limits.descriptors:
            return BadRequest(503, NO_DESCRIPTOR, CONNECTIONS_FULL)
        return None

    def _refuse(self, sock: socket.socket, refusal: BadRequest) -> None:
        """Answer and close at once, after reading received bytes: unread, they would reset the connection."""
        answer = self._answer_of(refusal)
        with sock, suppress(OSError):
            sock.send(answer)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(self.limits.header_bytes)
        self.observe(HttpEvent.CONNECTION_CLOSED)

    def _answer_of(self, refusal: BadRequest) -> bytes:
        return refusal_bytes(refusal.status, self.refused(refusal), self.date_line())

    def _handled(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._note_quiet()

    def _flush_all(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    def _sweep_all(self, now_s: float, awake_s: float) -> None:
        """Check every connection's timeouts."""
        for connection in list(self._connections):
            connection.sweep(now_s, awake_s)

    def _note_quiet(self) -> None:
        if not self._connections and not self._tasks:
            self._quiet.set()

    async def _wait_quiet(self, limit_s: float) -> bool:
        """Wait until no connection is open and no handler runs; return False after ``limit_s``."""
        self._quiet.clear()
        self._note_quiet()
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True
