"""One HTTP connection on asyncio: drives :class:`ServerConnection`, one request at a time.

A pipelined request waits until the answer before it has ended, its handler has returned and the client has
received enough of it. So answers keep their order, and a client that does not read cannot fill the memory.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeAlias, cast

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import BodyTooLarge, KvrouterError
from kvrouter.frontend.http.connection import ServerConnection
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.response import (
    CONTINUE,
    PROCESSING,
    UPLOADS_FULL,
    BadRequest,
    ConnectionClosed,
    Disconnect,
    Disconnected,
    ErrorAnswer,
    Event,
    Request,
    RequestHead,
    Responder,
    refusal_bytes,
)
from kvrouter.telemetry import Event as LogEvent
from kvrouter.telemetry import log_event

__all__ = ["Handler", "HttpEvent", "HttpProtocol", "ServerSide"]

Handler: TypeAlias = Callable[[Request, Responder], Coroutine[None, None, None]]
"""A function that answers one request through its responder."""

_log = logging.getLogger("kvrouter.frontend.http")


class HttpEvent(StrEnum):
    """The events that the server reports to its observer, for counting."""

    CONNECTION_OPENED = "connection_opened"
    CONNECTION_CLOSED = "connection_closed"
    CONNECTION_REFUSED = "connection_refused"
    REQUEST = "request"
    BAD_REQUEST = "bad_request"
    UPLOADS_FULL = "uploads_full"
    UPLOAD_TOO_SLOW = "upload_too_slow"
    CLIENT_LEFT = "client_left"
    WRITE_STALLED = "write_stalled"
    WRITE_OVERFLOW = "write_overflow"
    DRAIN_CUT = "drain_cut"
    HANDLER_FAILED = "handler_failed"


class ServerSide(Protocol):
    """The server's interface for its connections."""

    limits: Limits
    """The limits of every connection."""

    uploads: ByteBudget
    """The memory budget of requests without a handler yet."""

    is_draining: bool
    """Whether every answer must end its connection."""

    def opened(self, connection: "HttpProtocol") -> None:
        """Register an open connection; ``closed`` will follow."""

    def closed(self, connection: "HttpProtocol") -> None:
        """Remove a closed connection."""

    def handle(self, request: Request, responder: Responder) -> "asyncio.Task[None]":
        """Start the handler in a task."""

    def flush_soon(self, connection: "HttpProtocol") -> None:
        """Schedule ``connection.flush`` to run before the event loop next waits."""

    def date_line(self) -> bytes:
        """Return the Date header line of this second."""

    def observe(self, event: HttpEvent) -> None:
        """Count an event."""

    def refused(self, fault: BadRequest) -> ErrorAnswer:
        """Count and log (throttled) a request that is refused before a handler; return the answer."""

    def failed(self, fault: BadRequest) -> ErrorAnswer:
        """Count a request whose handler failed before it answered; return the answer."""


class TakenBytes:
    """Tracks when the client last received a byte, on a clock that stops while the event loop stalls."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self._taken_bytes = -1
        self._at_s = 0.0

    def stalled_s(self, waiting_bytes: int, awake_s: float) -> float:
        """Return the seconds, up to this call, without progress while ``waiting_bytes`` were unsent."""
        taken_bytes = self.written_bytes - waiting_bytes
        if waiting_bytes == 0 or taken_bytes != self._taken_bytes:
            self._taken_bytes, self._at_s = taken_bytes, awake_s
        return awake_s - self._at_s


@dataclass(slots=True)
class LastAnswer:
    """An answer that ends its connection, which lingers so that the client can read it."""

    data: bytes
    is_of_long_body: bool = False
    until_s: float | None = None
    """The end of lingering; None before the answer is written."""

    end_s: float = 0.0
    """The latest time to which further bytes extend ``until_s``."""


class HttpProtocol(asyncio.Protocol):
    """The asyncio protocol of one connection, and the :class:`ResponseConnection` of its responders."""

    def __init__(
        self, server: ServerSide, loop: asyncio.AbstractEventLoop, *, refusal: bytes | None = None
    ) -> None:
        """With a ``refusal``, the connection is answered with it and not served."""
        self._server = server
        self._last = None if refusal is None else LastAnswer(refusal)
        self._loop = loop
        self._connection = ServerConnection(server.limits, now_s=loop.time())
        self._requests: deque[Request] = deque()
        self._held_bytes = 0
        self._responder: Responder | None = None
        self.is_writable = True
        """Whether the unsent bytes are below the high-water mark."""
        self._writable: asyncio.Event | None = None  # set when the connection is writable again, or lost
        self._client: tuple[str, int] | None = None
        self._owes_continue = False
        self._head_s = 0.0
        self._reading = True
        self._input_ended = False
        self._closing = False
        self._lost = False
        self._cut_reason: Disconnect | None = None
        self._probed_at_s = 0.0
        self._taken = TakenBytes()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve, or write the refusal."""
        self._transport = cast("asyncio.Transport", transport)
        self._server.opened(self)
        self._transport.set_write_buffer_limits(
            high=self._server.limits.high_water_bytes, low=self._server.limits.low_water_bytes
        )
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._client = (str(peer[0]), int(peer[1]))
        if self._last is not None:
            self._connection.end()
            self._answer_last(self._last)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client; bytes after its last request are dropped."""
        last = self._last
        if not self._closing and last is None:
            self._take(self._connection.receive(data, self._loop.time()))
        elif last is not None and last.until_s is not None:
            until_s = self._loop.time() + self._server.limits.linger_s
            last.until_s = max(last.until_s, min(until_s, last.end_s))

    def eof_received(self) -> bool:
        """Handle the client's half-close; True keeps the connection open for pending answers."""
        self._input_ended = True
        if self._last is not None and self._last.until_s is not None:
            return False
        self._take(self._connection.receive_eof())
        return self._responder is not None or bool(self._requests) or self._last is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after a lost connection, and notify a handler that still answers."""
        self._lost = True
        self._set_writable()
        self._connection.end()
        self._requests.clear()
        self._account()
        responder = self._responder
        if responder is not None and not responder.ended:
            if responder.disconnected is None:
                self._server.observe(HttpEvent.CLIENT_LEFT)
                why = "closed" if exc is None else type(exc).__name__
                log_event(_log, LogEvent.HTTP_CLIENT_LEFT, started=responder.started, reason=why)
            responder.set_disconnected(self._cut_reason or Disconnect.CLIENT_LEFT)
        self._server.closed(self)

    def pause_writing(self) -> None:
        """Mark the connection not writable: the unsent bytes are over the high-water mark."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """Mark the connection writable again, and start the next request."""
        self._set_writable()
        self._advance()
        self._account()

    def _set_writable(self) -> None:
        self.is_writable = True
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    # Called by responders.

    @property
    def flush_at_bytes(self) -> int:
        """The unflushed bytes at which a stream is flushed at once."""
        return self._server.limits.high_water_bytes

    @property
    def may_keep_alive(self) -> bool:
        """Whether another answer may follow on this connection."""
        is_last = self._input_ended and not (self._requests or self._last)
        return not (self._server.is_draining or is_last)

    async def wait_writable(self) -> None:
        """Return once ``is_writable``, or once the connection is lost."""
        if not self.is_writable:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def date_line(self) -> bytes:
        """Return the Date header line of this second."""
        return self._server.date_line()

    def write(self, data: bytes) -> None:
        """Write bytes to the socket transport."""
        if not self._lost:
            self._taken.written_bytes += len(data)
            self._transport.write(data)

    def flush_soon(self) -> None:
        """Schedule ``flush`` to run before the event loop next waits."""
        self._server.flush_soon(self)

    def flush(self) -> None:
        """Send the pieces of the open stream; cut off a client with too many unsent bytes."""
        responder = self._responder
        if responder is None or responder.stream is None or responder.disconnected is not None:
            return
        data = responder.stream.take()
        if data:
            self.write(data)
        if (
            not self.is_writable
            and not responder.ended
            and self._transport.get_write_buffer_size() > self._server.limits.overflow_bytes
        ):
            self.cut(Disconnect.WRITE_OVERFLOW)

    # Called by the server.

    def sweep(self, now_s: float, awake_s: float) -> None:
        """Check the timeouts: request and idle time, lingering, stalled writes, and half-closed clients.

        ``awake_s`` is a clock that stops while the event loop stalls, because nothing is written then.
        """
        if self._last is not None and self._last.until_s is not None:
            if now_s >= self._last.until_s:
                self._transport.close()
        elif not self._closing:
            self._take(self._connection.on_time(now_s))
        waiting_bytes = self._transport.get_write_buffer_size()
        if self._taken.stalled_s(waiting_bytes, awake_s) >= self._server.limits.write_stall_s:
            self.cut(Disconnect.WRITE_STALLED)
        if self._input_ended and now_s - self._probed_at_s >= self._server.limits.probe_s:
            self._probed_at_s = now_s
            self._probe()

    def drain(self) -> None:
        """Close an idle connection; otherwise the current answer is the last one."""
        if self._responder is None and self._connection.is_idle and not self._lost:
            self._close()

    def cut(self, reason: Disconnect) -> None:
        """Abort the connection, with its unsent bytes, and pass the reason to the handler."""
        if self._lost or self._cut_reason is not None:
            return
        self._server.observe(HttpEvent(reason.value))
        unsent_bytes = self._transport.get_write_buffer_size()
        log_event(_log, LogEvent.HTTP_CUT, reason=reason.value, unsent_bytes=unsent_bytes)
        self._cut_reason = reason
        self._closing = True
        if self._responder is not None:
            self._responder.set_disconnected(reason)
        self._transport.abort()

    def shed(self) -> None:
        """Refuse the requests without a handler: the server's budget of uploads is full."""
        fault = self._connection.refusal(503, "too many bytes of requests are arriving", UPLOADS_FULL)
        if self._requests:  # the refusal answers the first
            first = self._requests[0]
            fault = replace(fault, path=first.path, headers=first.headers, began_s=first.began_s)
        self._held_bytes = 0
        self._requests.clear()
        self._connection.end()
        self._take([fault])

    # Progress of the connection.

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case RequestHead():
                    self._owes_continue = event.expects_continue
                    self._head_s = time.monotonic()
                case Request():
                    self._owes_continue = False
                    event.began_s, self._head_s = self._head_s, 0.0
                    self._requests.append(event)
                case BadRequest():
                    if event.began_s is None and self._head_s:
                        event = replace(event, began_s=self._head_s)  # noqa: PLW2901 - only here it is known
                    answer = self._server.refused(event)
                    data = refusal_bytes(event.status, answer, self._server.date_line())
                    self._last = LastAnswer(data, event.status == BodyTooLarge.status_hint)
                case ConnectionClosed():
                    self._input_ended = True
        self._advance()
        if (
            not (self._lost or self._closing or self._input_ended)
            and self._reading != self._connection.wants_read
        ):
            self._reading = not self._reading
            if self._reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        self._account()

    def _account(self) -> None:
        """Report the bytes of requests without a handler to the server's budget."""
        held_bytes = self._connection.unfinished_bytes
        if self._requests:
            held_bytes += sum(request.held_bytes for request in self._requests)
        if held_bytes != self._held_bytes:
            self._held_bytes = held_bytes
            self._server.uploads.hold(self, held_bytes)

    def _advance(self) -> None:
        """Start the next request or close, unless an answer is in progress or the client must read first."""
        if self._responder is not None or self._closing or self._lost or not self.is_writable:
            return
        if self._requests:
            request = self._requests.popleft()
            self._responder = Responder(request, self, client=self._client)
            self._server.observe(HttpEvent.REQUEST)
            self._server.handle(request, self._responder).add_done_callback(
                partial(self._handled, self._responder)
            )
        elif self._last is not None:
            self._answer_last(self._last)
        elif self._input_ended:
            self._close()
        elif self._owes_continue:
            self._owes_continue = False
            self.write(CONTINUE)

    def _handled(self, responder: Responder, task: "asyncio.Task[None]") -> None:
        if self._has_failed(responder, task):
            responder.keep_alive = False
            answerable = not responder.ended and responder.disconnected is None
            if answerable and responder.started:
                self.cut(Disconnect.HANDLER_FAILED)
            else:
                self._server.observe(HttpEvent.HANDLER_FAILED)
            if answerable and not responder.started:
                request = responder.request
                reason = "the server failed to answer this request"
                fault = BadRequest(500, reason, KvrouterError.code, request.path, request.headers)
                answer = self._server.failed(fault)
                responder.answer(fault.status, answer.headers, answer.body)
        self._responder = None
        responder.release()
        if self._lost:
            return
        if not responder.keep_alive or self._server.is_draining:
            self._close()
        else:
            self._take(self._connection.request_done(self._loop.time()))

    def _has_failed(self, responder: Responder, task: "asyncio.Task[None]") -> bool:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Disconnected):
            log_event(_log, LogEvent.HTTP_HANDLER_FAILED, started=responder.started, exc_info=error)
            return True
        if responder.ended or responder.disconnected is not None:
            return False
        why = "cancelled" if task.cancelled() else "returned without an answer"
        log_event(_log, LogEvent.HTTP_HANDLER_FAILED, started=responder.started, reason=why)
        return True

    def _answer_last(self, last: LastAnswer) -> None:
        """Write the last answer, and linger before closing: unread bytes would reset the connection.

        A client may read only after it has sent all of a too long body: while its bytes arrive, it has as
        long as for a body.
        """
        self.write(last.data)
        self._closing = True
        if self._input_ended or self._server.limits.linger_s == 0:
            self._close()
            return
        now_s = self._loop.time()
        last.until_s = now_s + self._server.limits.linger_s
        if last.is_of_long_body:
            last.end_s = now_s + self._server.limits.body_s
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        self._transport.write_eof()

    def _probe(self) -> None:
        responder = self._responder
        if responder is None or responder.ended or responder.disconnected is not None:
            return
        if responder.stream is not None:
            responder.stream.probe()
        elif responder.request.head.http_version == "1.1":
            self.write(PROCESSING)

    def _close(self) -> None:
        self._closing = True
        self._transport.close()
