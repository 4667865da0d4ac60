"""One request transport under test, with its workers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvrouter.transports.requests.port import Registration, RequestServer, RequestTransport
from tests.testing.tcp_proxy import TcpProxy

KillWorker = Callable[[], Awaitable[None]]
"""Kill the worker: it serves no longer, and says no more."""

SLOW_STREAM_LIMIT_S = 0.3
DEAD_AFTER_S = 1.0
"""Limits of the transports behind a :attr:`RequestTransportSetup.network`: tests of silence stay short."""


@dataclass
class RequestTransportSetup:
    """One plane under test: ``serve`` makes a worker reachable, and returns its address and its death.

    ``places`` are the workers' own ends of it, by address. ``close`` takes everything down, the workers' ends
    too. An ``open_timeout_s`` of a second or less keeps tests of silence short.

    ``serve_again`` brings a worker back at the address that another one died at. ``network`` stands between
    the plane and its workers, where a wire has one; ``reset_is_loss`` is false where an end that was cut off
    connects again, and is the same peer as before.
    """

    transport: RequestTransport
    serve: Callable[[RequestServer], Awaitable[tuple[str, KillWorker]]]
    nowhere: str
    places: dict[str, Registration]
    close: Callable[[], Awaitable[None]]
    serve_again: Callable[[str, RequestServer], Awaitable[None]] | None = None
    network: TcpProxy | None = None
    reset_is_loss: bool = True
