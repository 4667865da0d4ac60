"""Response bytes: heads, whole answers, chunks and server-sent events. No sockets and no clock."""

import re
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus

import msgspec

from kvrouter.core.errors import InvalidRequest, KvrouterError, Unavailable
from kvrouter.frontend.http.messages import BadRequest

__all__ = [
    "CONTINUE",
    "LAST_CHUNK",
    "PROCESSING",
    "SSE_DONE",
    "SSE_FILLER",
    "DateHeader",
    "ResponseHeaders",
    "chunk",
    "error_body",
    "refusal_bytes",
    "response_head",
    "sse_event",
]

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
    """An error in OpenAI's JSON shape; ``more`` fields stand beside OpenAI's own."""
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
