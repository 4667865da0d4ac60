"""An engine's own error answer, as it travels from the worker to the client: status, headers, bytes; and the
headers that do so of any answer.
"""

import re
from typing import Annotated

import msgspec

BODY_MAX_BYTES = 44 * 1024
"""The longest body: with headers and words it fits into the 64 KiB that a router reads of a refusal."""

HEADERS_MAX = 16
HEADER_MAX_BYTES = 512
"""How many headers travel, and the longest of an error answer: a longer one is left out."""

HEADERS_MAX_BYTES = 60 * 1024
"""What all headers of a good answer may have together. vLLM's ``metadata`` has some 130 bytes for each input
of a call for embeddings in bytes, and without it no client can read them.
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
"""The headers of an answer that clients act on; those that begin with ``x-ratelimit-`` pass too. vLLM's
``metadata`` says what embeddings in bytes are, and ``endpoint-load-metrics`` is what a client asked for.
"""

_RATES = b"x-ratelimit-"

_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_NAME = re.compile(rb"[a-z0-9-]+")


Headers = tuple[tuple[bytes, bytes], ...]


class EngineAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine answered in place of a good answer; the client gets it as it is.

    With ``is_events`` the body is the end of a stream: the error's own event, and what the engine sent with
    it.
    """

    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: Headers = ()
    body: bytes = b""
    is_events: bool = False


def passed_headers(headers: Headers, *, of_error: bool = False) -> Headers:
    """Return those of ``headers`` that a client gets, with names in lower case. A worker applies it to what
    its engine sent, a frontend to what a worker sent: neither can set any other header here.
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
