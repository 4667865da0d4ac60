"""HTTP messages as values and bytes, and the responder, which writes one request's response."""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
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
"""The code of a 503: as many connections are open as may be."""

UPLOADS_FULL = "uploads_full"
"""The code of a 503: the requests that are arriving hold as many bytes as they may together."""

UPLOAD_TOO_SLOW = "upload_too_slow"
"""The code of a 408: a body stood still, or came too slowly, for too long."""

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""(name, value) pairs in the order of the wire; names in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Request line and headers; the body may still be on its way."""

    method: str
    target: bytes
    """The path as it was sent, percent-encoded, without the query."""
    path: str
    """The path, percent-decoded."""
    query: str
    """What follows the first ``?``, as it was sent."""
    headers: Headers
    http_version: str
    """``1.0`` or ``1.1``."""
    keep_alive: bool
    """Whether the client may send another request on this connection."""
    expects_continue: bool
    """Whether the client holds its body back until it receives ``100 Continue``."""


@dataclass(slots=True)
class Request:
    """One complete request."""

    head: RequestHead
    body: bytes
    """Empty once it was taken."""
    head_bytes: int = field(default=0, compare=False)
    """What the head took on the wire."""
    on_read: Callable[[], None] | None = field(default=None, compare=False)
    """Is called once its body is read, and held no more."""
    began_s: float = field(default=0.0, compare=False)
    """When its head was here, on the monotonic clock."""

    @property
    def held_bytes(self) -> int:
        """What it takes of the budget of uploads while no handler has it."""
        return self.head_bytes + len(self.body)

    def take_body(self) -> bytes:
        """Return the body and drop the reference to it: a long one need not live as long as its answer."""
        body, self.body = self.body, b""
        return body

    def read(self) -> None:
        """The body is read, and held no more. Idempotent."""
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
        """What follows the first ``?``, as it was sent."""
        return self.head.query

    @property
    def headers(self) -> Headers:
        """(name, value) pairs; names in lower case."""
        return self.head.headers

    def header(self, name: str) -> str | None:
        """The first header of this name (any case), or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.head.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


@dataclass(frozen=True, slots=True)
class BadRequest:
    """The last event of a connection that cannot go on: answer ``status`` after what is owed, then close.

    ``path`` and ``headers`` are those of the request that is refused, as far as its head was read;
    ``began_s`` is when all of its head was here, on the monotonic clock, None where it never was.
    """

    status: int
    reason: str
    code: str = InvalidRequest.code
    path: str | None = None
    headers: Headers = field(default=(), compare=False)
    began_s: float | None = field(default=None, compare=False)

    def header(self, name: bytes) -> bytes:
        """The first header of this name, in lower case; empty where none was read."""
        return next((value for key, value in self.headers if key == name), b"")


class CloseReason(StrEnum):
    """Why no more requests will come."""

    EOF = "eof"
    EOF_IN_REQUEST = "eof_in_request"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """No more requests will come; what was received complete may still be answered."""

    reason: CloseReason


Event: TypeAlias = RequestHead | Request | BadRequest | ConnectionClosed


ResponseHeaders = Iterable[tuple[bytes, bytes]]
"""(name, value) pairs, without the ones that the server adds: Date, Connection and those of the framing."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
SSE_DONE = b"data: [DONE]\n\n"
SSE_FILLER = b": \n\n"
"""A comment: readers of an event stream skip it."""

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii") for s in HTTPStatus}
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SERVERS_OWN = frozenset({b"connection", b"content-length", b"date", b"transfer-encoding"})


class DateHeader:
    """The Date header line, formatted once per second of the time that is handed in."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self, now_unix_s: float) -> bytes:
        """``date: …\\r\\n`` for a wall-clock time in seconds since 1970."""
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
    """The status line and headers, with the empty line after them.

    ``connection`` is the Connection header's value, None for no such header. Neither ``content_bytes`` nor
    ``chunked``: the body lasts until the connection closes, or there is none. Raises ValueError for a header
    that would break the framing (a line break in a value, a name that is no token, one that is the server's
    own) and for a number that is no status of an answer. One that HTTP has no words for gets none.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        if not 200 <= status <= 599:
            raise ValueError(f"unknown HTTP status {status}")
        line = b"HTTP/1.1 %d \r\n" % status
    parts = [line, date_line]
    for name, value in headers:
        if not _NAME.fullmatch(name) or name.lower() in _SERVERS_OWN:
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


def chunk(pieces: list[bytes], size_bytes: int) -> bytes:
    """One chunk of the chunked coding that holds all pieces; ``size_bytes`` is their sum and not 0."""
    return b"".join((b"%x\r\n" % size_bytes, *pieces, b"\r\n"))


def sse_event(data: bytes) -> bytes:
    """One server-sent event; ``data`` is a single line, as JSON is."""
    return b"".join((b"data: ", data, b"\n\n"))


class ErrorAnswer(NamedTuple):
    """The answer to what the server refuses or failed to answer, apart from its status."""

    headers: ResponseHeaders
    body: bytes


def error_answer(fault: BadRequest) -> ErrorAnswer:
    """Return the answer to ``fault`` in OpenAI's form."""
    error: type[KvrouterError] = InvalidRequest if fault.status < 500 else KvrouterError
    headers: ResponseHeaders = ((b"content-type", b"application/json"),)
    if fault.status == Unavailable.status_hint:
        error = Unavailable
        headers = (*headers, (b"retry-after", b"1"))
    said = ApiError(message=fault.reason, type=error.type, code=fault.code)
    return ErrorAnswer(headers, msgspec.json.encode(ErrorBody(said)))


def refusal_bytes(status: int, answer: ErrorAnswer, date_line: bytes) -> bytes:
    """The whole answer to what no handler sees; the connection ends with it."""
    head = response_head(
        status,
        answer.headers,
        date_line=date_line,
        connection=b"close",
        content_bytes=len(answer.body),
        chunked=False,
    )
    return head + answer.body


__all__ = ["Disconnect", "Disconnected", "Responder", "Stream", "Wire"]

_WITHOUT_BODY = frozenset({204, 304})


class Disconnect(StrEnum):
    """Why nobody reads the answer any more."""

    CLIENT_LEFT = "client_left"
    WRITE_STALLED = "write_stalled"
    WRITE_OVERFLOW = "write_overflow"
    DRAIN_CUT = "drain_cut"
    HANDLER_FAILED = "handler_failed"


class Disconnected(Exception):
    """Nobody reads the answer any more; ``reason`` says why."""

    def __init__(self, reason: Disconnect) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Wire(Protocol):
    """What a responder needs of the connection it answers on."""

    @property
    def flush_at_bytes(self) -> int:
        """Unflushed bytes of a stream from which it is flushed at once."""

    @property
    def may_keep_alive(self) -> bool:
        """Whether the server, for its part, would take another request on this connection."""

    @property
    def is_writable(self) -> bool:
        """Whether the bytes not yet taken by the client are below the high-water mark."""

    async def wait_writable(self) -> None:
        """Returns once ``is_writable``, or once the connection is lost."""

    def date_line(self) -> bytes:
        """The Date header line of this second."""

    def write(self, data: bytes) -> None:
        """Hands bytes to the transport."""

    def flush_soon(self) -> None:
        """Calls ``flush`` before the event loop waits for sockets again."""

    def flush(self) -> None:
        """Hands what the open stream holds to the transport."""


class Stream:
    """A response body in pieces; made by :meth:`Responder.start_stream`."""

    __slots__ = (
        "_chunked",
        "_dropped",
        "_end",
        "_filler",
        "_flush_at_bytes",
        "_head",
        "_pieces",
        "_pieces_bytes",
        "_responder",
        "_wire",
    )

    def __init__(
        self, responder: "Responder", wire: Wire, *, head: bytes, chunked: bool, dropped: bool, filler: bytes
    ) -> None:
        self._responder = responder
        self._wire = wire
        self._head = head
        self._chunked = chunked
        self._dropped = dropped  # the answer to a HEAD has no body
        self._filler = filler
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._end = b""
        self._flush_at_bytes = wire.flush_at_bytes

    @property
    def ready(self) -> bool:
        """Whether the client keeps up: its unsent bytes are below the high-water mark, and it is there."""
        return self._wire.is_writable and self._responder.disconnected is None

    def write(self, data: bytes) -> None:
        """Adds to the body, without waiting. Nothing happens when the client is gone.

        A caller that writes on although the stream is not ``ready`` loses its client at
        ``Limits.overflow_bytes``. Raises RuntimeError after ``end``.
        """
        responder = self._responder
        if responder.ended:
            raise RuntimeError("the stream has ended")
        if responder.disconnected is not None or self._dropped or not data:
            return
        if not self._pieces and not self._head:
            self._wire.flush_soon()
        self._pieces.append(data)
        self._pieces_bytes += len(data)
        if self._pieces_bytes >= self._flush_at_bytes:
            self._wire.flush()

    async def wait_ready(self) -> None:
        """Returns once ``ready``. Raises :class:`Disconnected` when the client is gone."""
        await self._wire.wait_writable()
        if self._responder.disconnected is not None:
            raise Disconnected(self._responder.disconnected)

    def end(self) -> None:
        """The body is complete. Nothing happens the second time, or when the client is gone."""
        if self._responder.ended:
            return
        self._responder.ended = True
        if self._chunked and not self._dropped:
            self._end = LAST_CHUNK
        if self._responder.disconnected is None:
            self._wire.flush()

    def probe(self) -> None:
        """Writes the filler, so that a client that has closed answers with a reset."""
        self.write(self._filler)

    def take(self) -> bytes:
        """What is to be sent now: of the head, the pieces and the end, what was not sent yet."""
        pieces = self._pieces
        if len(pieces) == 1 and self._chunked and not self._head and not self._end:
            data = b"%x\r\n%b\r\n" % (self._pieces_bytes, pieces.pop())  # a token of a stream under way
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

    def __init__(self, request: Request, wire: Wire, *, client: tuple[str, int] | None) -> None:
        self.request = request
        self.client = client
        """(host, port) of the other side, None where the transport has no such address."""
        self.keep_alive = request.head.keep_alive
        """Whether the connection stays open after this answer; settled when the head is made."""
        self.ended = False
        """Whether the answer is complete."""
        self.more_headers: ResponseHeaders = ()
        """Headers that are added to the answer, errors included."""
        self.stream: Stream | None = None
        """The stream, once it is started."""
        self._started = False
        self._wire = wire
        self.disconnected: Disconnect | None = None
        """Why nobody reads the answer any more, None while somebody does.

        A client that only shut its writing side is still there: it may read. One that closed looks the
        same until something is sent to it, so the server probes it (``Limits.probe_s``).
        """
        self._on_disconnect: list[Callable[[Disconnect], None]] = []

    @property
    def started(self) -> bool:
        """Whether a head was made, so that no other answer can be given any more."""
        return self._started

    def on_disconnect(self, callback: Callable[[Disconnect], None]) -> None:
        """Calls ``callback`` once, from the event loop, when the client goes (or has gone) before the end."""
        if self.disconnected is None:
            self._on_disconnect.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback, self.disconnected)

    async def send(self, status: int, headers: ResponseHeaders = (), body: bytes = b"") -> None:
        """The whole answer; returns when the client has taken all but what the high-water mark allows.

        Nothing happens when the client is gone. Raises RuntimeError when an answer was started before, and
        ValueError for a head that HTTP does not allow.
        """
        self.answer(status, headers, body)
        await self._wire.wait_writable()

    def answer(self, status: int, headers: ResponseHeaders = (), body: bytes = b"") -> None:
        """``send`` without the wait."""
        if status in _WITHOUT_BODY and body:
            raise ValueError(f"a {status} has no body")
        head = self._head(status, headers, content_bytes=None if status in _WITHOUT_BODY else len(body))
        self.ended = True
        if self.disconnected is None:
            self._wire.write(head if self.request.method == "HEAD" else head + body)

    def start_stream(self, status: int, headers: ResponseHeaders = (), *, filler: bytes = b"") -> Stream:
        """Starts a body in pieces. Its head leaves at the end of this turn of the event loop.

        ``filler`` is something that readers of this body skip (``SSE_FILLER`` for an event stream); with it
        a client that closed its connection is noticed before the next piece. An HTTP/1.0 client gets no
        chunks: its body lasts until the connection closes. Raises as ``send`` does.
        """
        if status in _WITHOUT_BODY:
            raise ValueError(f"a {status} has no body")
        chunked = self.request.head.http_version == "1.1"
        self.keep_alive = self.keep_alive and chunked
        head = self._head(status, headers, content_bytes=None, chunked=chunked)
        self.stream = Stream(
            self, self._wire, head=head, chunked=chunked, dropped=self.request.method == "HEAD", filler=filler
        )
        self._wire.flush_soon()
        return self.stream

    def tell(self, reason: Disconnect) -> None:
        """The server's side of ``disconnected``: nobody reads the answer any more."""
        if self.disconnected is not None or self.ended:
            return
        self.disconnected = reason
        loop = asyncio.get_running_loop()
        for callback in self._on_disconnect:
            loop.call_soon(callback, reason)
        self._on_disconnect.clear()

    def release(self) -> None:
        """The handler has returned: drops what refers back to this responder, so that the request's body
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
        self.keep_alive = self.keep_alive and self._wire.may_keep_alive
        if self.request.head.http_version == "1.0":
            connection = b"keep-alive" if self.keep_alive else None
        else:
            connection = None if self.keep_alive else b"close"
        head = response_head(
            status,
            (*headers, *self.more_headers) if self.more_headers else headers,
            date_line=self._wire.date_line(),
            connection=connection,
            content_bytes=content_bytes,
            chunked=chunked,
        )
        self._started = True
        return head
