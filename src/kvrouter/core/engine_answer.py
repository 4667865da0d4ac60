"""An engine's own error response, passed from the worker to the client: status, headers, body; and the
headers that are passed from any response.
"""

import re
from typing import Annotated

import msgspec

BODY_MAX_BYTES = 44 * 1024
"""The longest body: with headers and message it fits into the 64 KiB that a router reads of a refusal."""

HEADERS_MAX = 16
HEADER_MAX_BYTES = 512
"""The most headers that are passed, and the longest header of an error response; a longer one is left out."""

HEADERS_MAX_BYTES = 60 * 1024
"""The most bytes of all headers of a successful response. vLLM's ``metadata`` has some 130 bytes for each
input of a call for embeddings in bytes, and a client cannot read them without it.
"""

PASSED_HEADERS = frozenset(
    {
        b"accept",
        b"allow",
        b"content-type",
        b"endpoint-load-metrics",
        b"metadata",
        b"retry-after",
        b"retry-after-ms",
        b"www-authenticate",
        b"x-should-retry",
    }
)
"""The response headers that are passed to clients, along with those that begin with ``x-ratelimit-``. vLLM's
``metadata`` describes embeddings in bytes; a client requests ``endpoint-load-metrics``.
"""

_RATES = b"x-ratelimit-"

_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_NAME = re.compile(rb"[a-z0-9-]+")


Headers = tuple[tuple[bytes, bytes], ...]


class EngineAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's error response, which the client gets unchanged.

    With ``is_events`` the body is the end of an event stream: the error event and what the engine sent with
    it.
    """

    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: Headers = ()
    body: bytes = b""
    is_events: bool = False


def passed_headers(headers: Headers, *, of_error: bool = False) -> Headers:
    """Return those of ``headers`` that a client gets, with names in lower case. A worker filters its engine's
    headers with it, and a frontend its worker's: neither can set any other header.
    """
    left_bytes = HEADERS_MAX * HEADER_MAX_BYTES if of_error else HEADERS_MAX_BYTES
    passed: list[tuple[bytes, bytes]] = []
    for name, value in ((name.lower(), value) for name, value in headers):
        n_bytes = len(name) + len(value)
        if (
            len(passed) < HEADERS_MAX
            and (name in PASSED_HEADERS or name.startswith(_RATES))
            and n_bytes <= (HEADER_MAX_BYTES if of_error else left_bytes)
            and _NAME.fullmatch(name)
            and _VALUE.fullmatch(value)
        ):
            passed.append((name, value))
            left_bytes -= n_bytes
    return tuple(passed)
