"""The limits of the HTTP server: every queue, buffer and wait, and the setting or constant behind it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

from kvrouter.core.errors import ConfigError

__all__ = ["BODY_UNASKED_BYTES", "BodyLimit", "Limits"]

BODY_UNASKED_BYTES = 64 * 1024
"""``Limits.body_limit`` is asked for the limit of a longer body alone."""


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """How long a body may be, and what the refusal of a longer one says behind the number."""

    max_bytes: int
    why: str


BodyLimits: TypeAlias = Callable[[str], BodyLimit]
"""The limit of a body by the path of its request."""

_MAY_BE_ZERO = frozenset({"linger_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one connection, and the whole server, may hold and wait for.

    Raises :class:`ConfigError`, which names the field, when a limit is not a positive finite number or
    the low-water mark, the high-water mark and the overflow do not rise in this order.
    """

    header_bytes: int = 64 * 1024
    """Request line, headers and trailers of one request; more is answered 431."""

    headers: int = 100
    """Header lines of one request; more is answered 431."""

    body_bytes: int = 64 * 1024 * 1024
    """Body of one request; more is answered 413. Also the sum of the bodies that wait on one connection."""

    body_limit: BodyLimits | None = None
    """What bodies over ``BODY_UNASKED_BYTES`` may have at a path, where that is less than ``body_bytes``."""

    uploads_bytes: int = 512 * 1024 * 1024
    """Bytes of requests that have not reached their handler, over all connections; when there are more, the
    largest upload is answered 503. At least ``body_bytes``."""

    pipelined_requests: int = 8
    """Requests received and not yet answered on one connection; at the limit, reading pauses."""

    connections: int = 16384
    """Open connections; one more is answered 503."""

    descriptors: int = 2**31
    """File descriptors that connections may use: one that got this number, or a higher one, is answered 503.
    What lies above is for the process's own connections and files."""

    refused_connections: int = 64
    """Connections that stay for ``linger_s`` after they were answered 503; one more is closed at once."""

    header_s: float = 10.0
    """From the first byte of a request (or the accept, for the first one) to the end of its headers."""

    body_s: float = 30.0
    """How long a request's body may arrive more slowly than ``body_bytes_per_s``; then it is answered 408."""

    body_bytes_per_s: float = 64 * 1024.0
    """The slowest upload that is waited for once ``body_s`` is used up."""

    idle_s: float = 75.0
    """Between two requests of a kept-alive connection."""

    write_stall_s: float = 60.0
    """How long a client may take no byte at all of what waits for it before it is cut off."""

    high_water_bytes: int = 64 * 1024
    """Unsent bytes of one connection from which a stream is not ready."""

    low_water_bytes: int = 16 * 1024
    """Unsent bytes of one connection down from which a stream is ready again."""

    overflow_bytes: int = 1024 * 1024
    """Unsent bytes that a stream may pile up although it is not ready, before its client is cut off."""

    linger_s: float = 2.0
    """After an error answer: how long leftover bytes are still read, so that the client gets the answer. Of a
    body that is too long they are read until they have stopped for this time, within ``body_s``."""

    probe_s: float = 1.0
    """Between two probes of a client that shut its writing side and waits for an answer."""

    handler_grace_s: float = 1.0
    """For a handler to return after its connection was cut to drain, before it is cancelled."""

    sweep_s: float = 0.5
    """Between two looks at all connections' clocks: the grain of every time limit here."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "body_limit":
                continue
            fits = value >= 0 if field.name in _MAY_BE_ZERO else value > 0
            if not (math.isfinite(value) and fits):
                raise ConfigError(f"{field.name} must be a positive number, not {value}", param=field.name)
        for low, high in (("low_water_bytes", "high_water_bytes"), ("high_water_bytes", "overflow_bytes")):
            if getattr(self, low) >= getattr(self, high):
                raise ConfigError(f"{low} must be below {high}", param=low)
        if self.uploads_bytes < self.body_bytes:
            raise ConfigError("uploads_bytes must not be below body_bytes", param="uploads_bytes")
