"""The HTTP server: listens, keeps its connections' clocks, and drains."""

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
"""Called with everything that is worth counting."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""

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
"""Called with what the server answers by itself; returns the answer."""


def _observe_nothing(_: HttpEvent) -> None:
    pass


class Sweep:
    """Calls ``look`` every ``every_s`` seconds with the loop's time and that of an :class:`AwakeClock`; once
    later when the loop stood still, for what came meanwhile is not read yet.
    """

    def __init__(self, every_s: float, look: Callable[[float, float], None]) -> None:
        self._look = look
        self._awake = AwakeClock(every_s)
        self._due_s = 0.0
        self._is_put_off = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; idempotent."""
        if self._timer is None:
            self._await(loop)

    def stop(self) -> None:
        """End; idempotent."""
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

    A handler that raises before its answer has begun is answered for with a 500; after that its connection
    is cut, so that the client cannot take the part for the whole. A handler is not cancelled when its
    client leaves: it is notified (:class:`Responder`). Only ``drain`` cancels, at its very end.

    ``on_refused`` gets everything that is refused before a handler sees it, connections too, ``on_failed``
    requests whose handler failed.
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
        self._served = 0  # connections accepted and not refused, those that are not opened yet included
        self._refused_connections: set[HttpProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unflushed: list[HttpProtocol] = []
        self.uploads = ByteBudget(self.limits.uploads_bytes)
        """The budget of requests that no handler has yet."""
        self._throttle = LogThrottle()
        self._date = DateHeader()
        self._sweep = Sweep(self.limits.sweep_s, self._sweep_all)
        self._quiet = asyncio.Event()
        self.is_draining = False
        """Whether answers should end their connections."""

    async def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        sockets: Sequence[socket.socket] | None = None,
    ) -> None:
        """Starts to accept on ``host:port`` (port 0: any), or on bound ``sockets``; returns at once.

        Raises OSError when an address cannot be had, RuntimeError after ``drain``.
        """
        if self.is_draining:
            raise RuntimeError("this server has drained")
        self._loop = asyncio.get_running_loop()
        if sockets is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets = [socket.create_server((host, port), family=family)]
        for sock in sockets:
            sock.listen(BACKLOG)
            self._listeners.append(Listener(sock, loop=self._loop, take=self._take, answer=self._turn_away))
        self._sweep.start(self._loop)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of every listening socket."""
        return [listener.address for listener in self._listeners]

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    @property
    def running(self) -> int:
        """Handlers that have not returned."""
        return len(self._tasks)

    async def drain(self, limit_s: float) -> int:
        """Stops accepting, lets what runs finish for ``limit_s`` seconds, then cuts it.

        Returns how many connections were cut. Handlers learn of it (``Disconnect.DRAIN_CUT``) and are
        cancelled after ``Limits.handler_grace_s`` more. Idle connections close at once, busy ones after
        their answer; a request that is half received is still served.
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

    # What connections call.

    def opened(self, connection: HttpProtocol) -> None:
        """A connection is there; ``closed`` will be called."""
        self._connections.add(connection)

    def closed(self, connection: HttpProtocol) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        if connection in self._refused_connections:
            self._refused_connections.remove(connection)
        else:
            self._served -= 1
        self.observe(HttpEvent.CONNECTION_CLOSED)
        self._note_quiet()

    def handle(self, request: Request, responder: Responder) -> "asyncio.Task[None]":
        """Runs the handler."""
        task = self._loop.create_task(self._handler(request, responder))
        self._tasks.add(task)
        task.add_done_callback(self._handled)
        return task

    def flush_soon(self, connection: HttpProtocol) -> None:
        """Has ``connection.flush`` called before the event loop waits for sockets again."""
        if not self._unflushed:
            self._loop.call_soon(self._flush_all)
        self._unflushed.append(connection)

    def date_line(self) -> bytes:
        """The Date header line of this second."""
        return self._date.line(time.time())

    def refused(self, fault: BadRequest) -> ErrorAnswer:
        """Counts what is refused before any handler sees it, and logs it once in a while; returns what it is
        answered.
        """
        self.observe(_COUNTED.get(fault.code, HttpEvent.BAD_REQUEST))
        if self._throttle.allows(f"{fault.status} {fault.code} {fault.reason}"):
            event = _LOGGED.get(fault.code, LogEvent.HTTP_BAD_REQUEST)
            log_event(_log, event, status=fault.status, code=fault.code, reason=fault.reason)
        return self._on_refused(fault)

    def _take(self, sock: socket.socket) -> None:
        """Serve a connection, or refuse it: it may stay until its client has read why if few others do."""
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
        """No file descriptor is left."""
        self._refuse(sock, BadRequest(503, NO_DESCRIPTOR, CONNECTIONS_FULL))

    def _refusal(self, descriptor: int) -> BadRequest | None:
        if self._served >= self.limits.connections:
            return BadRequest(503, f"{self.limits.connections} connections are open", CONNECTIONS_FULL)
        if descriptor >= self.limits.descriptors:
            return BadRequest(503, NO_DESCRIPTOR, CONNECTIONS_FULL)
        return None

    def _refuse(self, sock: socket.socket, refusal: BadRequest) -> None:
        """Answer and close at once. What came already is read: left unread, it would reset the answer."""
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
        """Look at every connection's clocks."""
        for connection in list(self._connections):
            connection.sweep(now_s, awake_s)

    def _note_quiet(self) -> None:
        if not self._connections and not self._tasks:
            self._quiet.set()

    async def _wait_quiet(self, limit_s: float) -> bool:
        """Waits until no connection is open and no handler runs; False when the limit came first."""
        self._quiet.clear()
        self._note_quiet()
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True
