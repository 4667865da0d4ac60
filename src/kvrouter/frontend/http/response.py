"""HTTP requests and responses as values and bytes, and the responder, which answers one request."""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from kvrouter.api.error_schema import ApiError, ErrorBody
from kvrouter.core.errors import InvalidRequest, KvrouterError, Unavailable

__all__ = [
    "CONNECTIONS_FULL",
    "CONTINUE",
    "LAST_CHUNK",
    "PROCESSING",
    "SSE_DONE",
    "SSE_FILLER",
    "UPLOADS_FULL",
    "UPLOAD_TOO_SLOW",
    "BadRequest",
    "CloseReason",
    "ConnectionClosed",
    "DateHeader",
    "ErrorAnswer",
    "Event",
    "Headers",
    "Request",
    "RequestHead",
    "ResponseHeaders",
    "chunk",
    "error_answer",
    "refusal_bytes",
    "response_head",
    "sse_event",
]


CONNECTIONS_FULL = "too_many_connections"
"""The code of a 503: the limit of open connections is reached."""

UPLOADS_FULL = "uploads_full"
"""The code of a 503: the budget of arriving requests is used up."""

UPLOAD_TOO_SLOW = "upload_too_slow"
"""The code of a 408: a body stalled or arrived too slowly for too long."""

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""(name, value) pairs in the order received; names in lower case."""


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """Request line and headers; the body may still be on its way."""

    method: str
    target: bytes
    """The path as sent, percent-encoded, without the query."""
    path: str
    """The path, percent-decoded."""
    query: str
    """The query string, as sent."""
    headers: Headers
    http_version: str
    """``1.0`` or ``1.1``."""
    keep_alive: bool
    """Whether the client may send another request on this connection."""
    expects_continue: bool
    """Whether the client waits for ``100 Continue`` before it sends the body."""


@dataclass(slots=True)
class Request:
    """One complete request."""

    head: RequestHead
    body: bytes
    """Empty after ``take_body``."""
    head_bytes: int = field(default=0, compare=False)
    """The length of the head as received."""
    on_read: Callable[[], None] | None = field(default=None, compare=False)
    """Called when the body is no longer held."""
    began_s: float = field(default=0.0, compare=False)
    """The time at which the head was complete, on the monotonic clock."""
    _first: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    """The first header of each name; None before one is looked up."""

    @property
    def held_bytes(self) -> int:
        """The bytes that count against the budget of uploads while no handler has the request."""
        return self.head_bytes + len(self.body)

    def take_body(self) -> bytes:
        """Return the body and drop the reference, so that it can be freed before the answer ends."""
        body, self.body = self.body, b""
        return body

    def read(self) -> None:
        """Release the budget of the body, which is read. Idempotent."""
        if self.on_read is not None:
            self.on_read()

    @property
    def method(self) -> str:
        """The method, in capitals."""
        return self.head.method

    @property
    def path(self) -> str:
        """The path, percent-decoded."""
        return self.head.path

    @property
    def query(self) -> str:
        """The query string, as sent."""
        return self.head.query

    @property
    def headers(self) -> Headers:
        """(name, value) pairs; names in lower case."""
        return self.head.headers

    def header(self, name: str) -> str | None:
        """Return the first header of this name (any case), or None."""
        if self._first is None:
            self._first = dict(reversed(self.head.headers))
        value = self._first.get(name.lower().encode("latin-1"))
        return None if value is None else value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class BadRequest:
    """The last event of a connection: answer pending requests, then ``status``, then close.

    ``path`` and ``headers`` are those of the refused request, as far as its head was read; ``began_s`` is
    the time at which its head was complete, on the monotonic clock, None if it never was.
    """

    status: int
    reason: str
    code: str = InvalidRequest.code
    path: str | None = None
    headers: Headers = field(default=(), compare=False)
    began_s: float | None = field(default=None, compare=False)

    def header(self, name: bytes) -> bytes:
        """Return the first header of this name, in lower case; empty if none was read."""
        return next((value for key, value in self.headers if key == name), b"")


class CloseReason(StrEnum):
    """Why no further requests will come."""

    EOF = "eof"
    EOF_IN_REQUEST = "eof_in_request"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """No further requests will come; complete ones may still be answered."""

    reason: CloseReason


Event: TypeAlias = RequestHead | Request | BadRequest | ConnectionClosed


ResponseHeaders = Iterable[tuple[bytes, bytes]]
"""(name, value) pairs, without those that the server adds: Date, Connection and the framing."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
SSE_DONE = b"data: [DONE]\n\n"
SSE_FILLER = b": \n\n"
"""A comment, which readers of an event stream skip."""

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii") for s in HTTPStatus}
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SERVER_HEADERS = frozenset({b"connection", b"content-length", b"date", b"transfer-encoding"})


class DateHeader:
    """Formats the Date header line, once per second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self, now_unix_s: float) -> bytes:
        """Return ``date: …\\r\\n`` for a wall-clock time in seconds since 1970."""
        second = int(now_unix_s)
        if second != self._second:
            self._second = second
            self._line = b"date: " + formatdate(second, usegmt=True).encode("ascii") + b"\r\n"
        return self._line


def response_head(
    status: int,
    headers: ResponseHeaders,
    *,
    date_line: bytes,
    connection: bytes | None,
    content_bytes: int | None,
    chunked: bool,
) -> bytes:
    """Return the status line and headers, with the empty line after them.

    ``connection`` is the Connection header's value, None for no such header. Without ``content_bytes`` and
    ``chunked`` the body lasts until the connection closes, or is absent. Raises ValueError for a header that
    would break the framing (a line break in a value, an invalid name, a header that the server sets) and for
    a status outside 200 to 599. A status unknown to HTTP gets no reason phrase.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        if not 200 <= status <= 599:
            raise ValueError(f"unknown HTTP status {status}")
        line = b"HTTP/1.1 %d \r\n" % status
    parts = [line, date_line]
    for name, value in headers:
        if not _may_be_set(name):
            raise ValueError(f"not a header name that may be set: {name!r}")
        if _NOT_IN_VALUE.search(value):
            raise ValueError(f"control character in the value of {name!r}")
        parts += (name, b": ", value, b"\r\n")
    if content_bytes is not None:
        parts.append(b"content-length: %d\r\n" % content_bytes)
    elif chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    if connection is not None:
        parts += (b"connection: ", connection, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _may_be_set(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None and name.lower() not in _SERVER_HEADERS


def chunk(pieces: list[bytes], size_bytes: int) -> bytes:
    """Return one HTTP chunk with all pieces; ``size_bytes`` is their total length, which is not 0."""
    return b"".join((b"%x\r\n" % size_bytes, *pieces, b"\r\n"))


def sse_event(data: bytes) -> bytes:
    """Return one server-sent event; ``data`` is a single line, such as JSON."""
    return b"".join((b"data: ", data, b"\n\n"))


class ErrorAnswer(NamedTuple):
    """The headers and body of the answer to a refused or failed request."""

    headers: ResponseHeaders
    body: bytes


def error_answer(fault: BadRequest) -> ErrorAnswer:
    """Return the answer to ``fault`` in OpenAI's form."""
    error: type[KvrouterError] = InvalidRequest if fault.status < 500 else KvrouterError
    headers: ResponseHeaders = ((b"content-type", b"application/json"),)
    if fault.status == Unavailable.status_hint:
        error = Unavailable
        headers = (*headers, (b"retry-after", b"1"))
    api_error = ApiError(message=fault.reason, type=error.type, code=fault.code)
    return ErrorAnswer(headers, msgspec.json.encode(ErrorBody(api_error)))


def refusal_bytes(status: int, answer: ErrorAnswer, date_line: bytes) -> bytes:
    """Return the complete answer to a request without a handler, which ends the connection."""
    head = response_head(
        status,
        answer.headers,
        date_line=date_line,
        connection=b"close",
        content_bytes=len(answer.body),
        chunked=False,
    )
    return head + answer.body


__all__ = ["Disconnect", "Disconnected", "Responder", "ResponseConnection", "Stream"]

_WITHOUT_BODY = frozenset({204, 304})


class Disconnect(StrEnum):
    """Why the answer can no longer be delivered."""

    CLIENT_LEFT = "client_left"
    WRITE_STALLED = "write_stalled"
    WRITE_OVERFLOW = "write_overflow"
    DRAIN_CUT = "drain_cut"
    HANDLER_FAILED = "handler_failed"


class Disconnected(Exception):
    """The answer can no longer be delivered, for ``reason``."""

    def __init__(self, reason: Disconnect) -> None:
        super().__init__(reason.value)
        self.reason = reason


class ResponseConnection(Protocol):
    """The connection's interface for responders and streams."""

    @property
    def flush_at_bytes(self) -> int:
        """The unflushed bytes at which a stream is flushed at once."""

    @property
    def may_keep_alive(self) -> bool:
        """Whether the server would take another request on this connection."""

    @property
    def is_writable(self) -> bool:
        """Whether the unsent bytes are below the high-water mark."""

    async def wait_writable(self) -> None:
        """Return once ``is_writable``, or once the connection is lost."""

    def date_line(self) -> bytes:
        """Return the Date header line of this second."""

    def write(self, data: bytes) -> None:
        """Write bytes to the socket transport."""

    def flush_soon(self) -> None:
        """Schedule ``flush`` to run before the event loop next waits."""

    def flush(self) -> None:
        """Write the pieces of the open stream to the socket transport."""


class Stream:
    """A response body that is written in pieces; made by :meth:`Responder.start_stream`."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_dropped",
        "_end",
        "_filler",
        "_flush_at_bytes",
        "_head",
        "_pieces",
        "_pieces_bytes",
        "_responder",
    )

    def __init__(
        self,
        responder: "Responder",
        connection: ResponseConnection,
        *,
        head: bytes,
        chunked: bool,
        dropped: bool,
        filler: bytes,
    ) -> None:
        self._responder = responder
        self._connection = connection
        self._head = head
        self._chunked = chunked
        self._dropped = dropped  # the answer to a HEAD has no body
        self._filler = filler
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._end = b""
        self._flush_at_bytes = connection.flush_at_bytes

    @property
    def ready(self) -> bool:
        """Whether the client is connected and its unsent bytes are below the high-water mark."""
        return self._connection.is_writable and self._responder.disconnected is None

    def write(self, data: bytes) -> None:
        """Append to the body without waiting. Does nothing when the client is gone.

        Writing while the stream is not ``ready`` cuts off the client at ``Limits.overflow_bytes``. Raises
        RuntimeError after ``end``.
        """
        responder = self._responder
        if responder.ended:
            raise RuntimeError("the stream has ended")
        if responder.disconnected is not None or self._dropped or not data:
            return
        if not self._pieces and not self._head:
            self._connection.flush_soon()
        self._pieces.append(data)
        self._pieces_bytes += len(data)
        if self._pieces_bytes >= self._flush_at_bytes:
            self._connection.flush()

    async def wait_ready(self) -> None:
        """Return once ``ready``. Raises :class:`Disconnected` when the client is gone."""
        await self._connection.wait_writable()
        if self._responder.disconnected is not None:
            raise Disconnected(self._responder.disconnected)

    def end(self) -> None:
        """End the complete body. Does nothing the second time, or when the client is gone."""
        if self._responder.ended:
            return
        self._responder.ended = True
        if self._chunked and not self._dropped:
            self._end = LAST_CHUNK
        if self._responder.disconnected is None:
            self._connection.flush()

    def probe(self) -> None:
        """Write the filler: a client that has closed answers with a reset."""
        self.write(self._filler)

    def take(self) -> bytes:
        """Return the unsent bytes of the head, the pieces and the end."""
        pieces = self._pieces
        if len(pieces) == 1 and self._chunked and not self._head and not self._end:
            data = b"%x\r\n%b\r\n" % (self._pieces_bytes, pieces.pop())  # the usual case: one token
            self._pieces_bytes = 0
            return data
        parts = [self._head]
        if pieces:
            if self._chunked:
                parts.append(chunk(pieces, self._pieces_bytes))
            else:
                parts += pieces
        parts.append(self._end)
        self._head = self._end = b""
        self._pieces = []
        self._pieces_bytes = 0
        return b"".join(parts)


class Responder:
    """Answers one request: either :meth:`send`, or :meth:`start_stream` and the stream's ``end``."""

    def __init__(
        self, request: Request, connection: ResponseConnection, *, client: tuple[str, int] | None
    ) -> None:
        self.request = request
        self.client = client
        """(host, port) of the client; None on a transport without addresses."""
        self.keep_alive = request.head.keep_alive
        """Whether the connection stays open after this answer; final once the head is made."""
        self.ended = False
        """Whether the answer is complete."""
        self.more_headers: ResponseHeaders = ()
        """Headers added to the answer, also to an error."""
        self.stream: Stream | None = None
        """The stream; None before ``start_stream``."""
        self._started = False
        self._connection = connection
        self.disconnected: Disconnect | None = None
        """Why the answer can no longer be delivered; None while it can.

        A half-closed client may still read. A closed one looks the same until bytes are sent to it, so the
        server probes it (``Limits.probe_s``).
        """
        self._on_disconnect: list[Callable[[Disconnect], None]] = []

    @property
    def started(self) -> bool:
        """Whether the head was made, after which no other answer is possible."""
        return self._started

    def on_disconnect(self, callback: Callable[[Disconnect], None]) -> None:
        """Call ``callback`` once, from the event loop, if the client disconnects (or has) before the end."""
        if self.disconnected is None:
            self._on_disconnect.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback, self.disconnected)

    async def send(self, status: int, headers: ResponseHeaders = (), body: bytes = b"") -> None:
        """Send a complete answer; return when the unsent bytes are below the high-water mark.

        Does nothing when the client is gone. Raises RuntimeError if an answer was started before, and
        ValueError for an invalid head.
        """
        self.answer(status, headers, body)
        await self._connection.wait_writable()

    def answer(self, status: int, headers: ResponseHeaders = (), body: bytes = b"") -> None:
        """Send a complete answer without waiting; otherwise as :meth:`send`."""
        if status in _WITHOUT_BODY and body:
            raise ValueError(f"a {status} has no body")
        head = self._head(status, headers, content_bytes=None if status in _WITHOUT_BODY else len(body))
        self.ended = True
        if self.disconnected is None:
            self._connection.write(head if self.request.method == "HEAD" else head + body)

    def start_stream(self, status: int, headers: ResponseHeaders = (), *, filler: bytes = b"") -> Stream:
        """Start a body in pieces. Its head is sent before the event loop next waits.

        ``filler`` is ignored by readers of the body (``SSE_FILLER`` for an event stream); probes send it, to
        notice a closed client before the next piece. An HTTP/1.0 client gets no chunks: its body lasts until
        the connection closes. Raises as ``send`` does.
        """
        if status in _WITHOUT_BODY:
            raise ValueError(f"a {status} has no body")
        chunked = self.request.head.http_version == "1.1"
        self.keep_alive = self.keep_alive and chunked
        head = self._head(status, headers, content_bytes=None, chunked=chunked)
        self.stream = Stream(
            self,
            self._connection,
            head=head,
            chunked=chunked,
            dropped=self.request.method == "HEAD",
            filler=filler,
        )
        self._connection.flush_soon()
        return self.stream

    def flush(self) -> None:
        """Send what was written to the stream now."""
        self._connection.flush()

    def set_disconnected(self, reason: Disconnect) -> None:
        """Set ``disconnected``, unless the answer has ended, and schedule the callbacks."""
        if self.disconnected is not None or self.ended:
            return
        self.disconnected = reason
        loop = asyncio.get_running_loop()
        for callback in self._on_disconnect:
            loop.call_soon(callback, reason)
        self._on_disconnect.clear()

    def release(self) -> None:
        """Drop the references back to this responder after the handler returned, so that the request's body
        is freed with its last user.
        """
        self.stream = None
        self._on_disconnect.clear()

    def _head(
        self, status: int, headers: ResponseHeaders, *, content_bytes: int | None, chunked: bool = False
    ) -> bytes:
        if self._started:
            raise RuntimeError("an answer was started before")
        if status < 200:
            raise ValueError(f"{status} is no final answer")
        self.keep_alive = self.keep_alive and self._connection.may_keep_alive
        if self.request.head.http_version == "1.0":
            connection = b"keep-alive" if self.keep_alive else None
        else:
            connection = None if self.keep_alive else b"close"
        head = response_head(
            status,
            (*headers, *self.more_headers) if self.more_headers else headers,
            date_line=self._connection.date_line(),
            connection=connection,
            content_bytes=content_bytes,
            chunked=chunked,
        )
        self._started = True
        return head
