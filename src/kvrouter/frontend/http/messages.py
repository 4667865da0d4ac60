"""What one HTTP/1.1 server connection reports: requests, and the ways in which it ends."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvrouter.core.errors import InvalidRequest

__all__ = [
    "CONNECTIONS_FULL",
    "UPLOADS_FULL",
    "UPLOAD_TOO_SLOW",
    "BadRequest",
    "CloseReason",
    "ConnectionClosed",
    "Event",
    "Headers",
    "Request",
    "RequestHead",
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
    """Whether the client holds its body back until it is told ``100 Continue``."""


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
