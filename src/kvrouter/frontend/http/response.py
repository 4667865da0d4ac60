"""HTTP messages as values and bytes: requests, heads, whole responses, chunks, server-sent events."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
from http import HTTPStatus
from typing import TypeAlias

import msgspec

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
    "Event",
    "Headers",
    "Request",
    "RequestHead",
    "ResponseHeaders",
    "chunk",
    "error_body",
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

    @property
    def held_bytes(self) -> int:
        """What it takes of the budget of uploads while no handler has it."""
        return self.head_bytes + len(self.body)

    def take_body(self) -> bytes:
        """Return the body and let go of it: a long one need not live as long as its answer."""
        body, self.body = self.body, b""
        return body

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
    """The last event of a connection that cannot go on: answer ``status`` after what is owed, then close."""

    status: int
    reason: str
    code: str = InvalidRequest.code


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
    own) and for a status that HTTP does not know.
    """
    line = _STATUS_LINES.get(status)
    if line is None:
        raise ValueError(f"unknown HTTP status {status}")
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


def error_body(
    message: str,
    *,
    error_type: str,
    code: str,
    param: str | None = None,
    more: Mapping[str, object] | None = None,
) -> bytes:
    """An error in OpenAI's JSON shape; ``more`` fields are added to OpenAI's own."""
    error = {"message": message, "type": error_type, "param": param, "code": code, **(more or {})}
    return msgspec.json.encode({"error": error})


def refusal_bytes(refusal: BadRequest, date_line: bytes) -> bytes:
    """The whole answer to what no handler sees; the connection ends with it."""
    error: type[KvrouterError] = InvalidRequest if refusal.status < 500 else KvrouterError
    headers: ResponseHeaders = ((b"content-type", b"application/json"),)
    if refusal.status == Unavailable.status_hint:
        error = Unavailable
        headers = (*headers, (b"retry-after", b"1"))
    body = error_body(refusal.reason, error_type=error.type, code=refusal.code)
    head = response_head(
        refusal.status,
        headers,
        date_line=date_line,
        connection=b"close",
        content_bytes=len(body),
        chunked=False,
    )
    return head + body
