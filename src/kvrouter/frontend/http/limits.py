"""The limits of the HTTP server: all its queues, buffers and waits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

from kvrouter.core.errors import ConfigError

__all__ = ["BODY_UNASKED_BYTES", "BodyLimit", "Limits"]

BODY_UNASKED_BYTES = 64 * 1024
"""``Limits.body_limit`` is called only for longer bodies."""


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The longest body, and the reason that follows the number in a refusal."""

    max_bytes: int
    why: str


BodyLimits: TypeAlias = Callable[[str], BodyLimit]
"""Returns the limit of a body by the path of its request."""

_MAY_BE_ZERO = frozenset({"linger_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one connection and of the server.

    Raises :class:`ConfigError`, which names the field, when a limit is not a positive finite number or
    the low-water mark, the high-water mark and the overflow do not rise in this order.
    """

    header_bytes: int = 64 * 1024
    """The longest request line, headers and trailers of one request, in bytes; more is answered 431."""

    headers: int = 100
    """The most header lines of one request; more is answered 431."""

    body_bytes: int = 64 * 1024 * 1024
    """The longest body; more is answered 413. Also the limit of all waiting bodies of a connection."""

    body_limit: BodyLimits | None = None
    """The limit, by path, of bodies over ``BODY_UNASKED_BYTES``, if lower than ``body_bytes``."""

    uploads_bytes: int = 512 * 1024 * 1024
    """The most bytes of requests without a handler yet, over all connections; at more, the largest upload
    is answered 503. At least ``body_bytes``."""

    pipelined_requests: int = 8
    """The most unanswered requests of one connection; at the limit, reading pauses."""

    connections: int = 16384
    """The most open connections; one more is answered 503."""

    descriptors: int = 2**31
    """Connections with a file descriptor of this number or higher are answered 503; those are kept for the
    process's own connections and files."""

    refused_connections: int = 64
    """The most connections that linger after a 503; one more is closed at once."""

    header_s: float = 10.0
    """The time from a request's first byte to the end of its headers."""

    body_s: float = 30.0
    """The time for which a body may arrive more slowly than ``body_bytes_per_s``; then it is answered 408."""

    body_bytes_per_s: float = 64 * 1024.0
    """The slowest allowed upload once ``body_s`` is used up."""

    idle_s: float = 75.0
    """The longest time without a request, of a new connection and of a kept-alive one."""

    write_stall_s: float = 60.0
    """The time without progress after which a client with unsent bytes is cut off."""

    high_water_bytes: int = 64 * 1024
    """The unsent bytes of a connection at which a stream stops being ready."""

    low_water_bytes: int = 16 * 1024
    """The unsent bytes of a connection at which a stream is ready again."""

    overflow_bytes: int = 1024 * 1024
    """The unsent bytes of a stream that is not ready at which its client is cut off."""

    linger_s: float = 2.0
    """The time for which leftover bytes are read after an error answer, so that the client gets the answer.
    Those of a too long body are read until none came for this time, within ``body_s``."""

    probe_s: float = 1.0
    """The time between two probes of a half-closed client that waits for an answer."""

    handler_grace_s: float = 1.0
    """The time for a handler to return after a drain cut its connection; then it is cancelled."""

    sweep_s: float = 0.5
    """The time between two checks of all timeouts: the resolution of every time limit here."""

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
