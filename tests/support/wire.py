"""What a test of the request plane needs of one wire."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvrouter.planes.requests.port import Registration, RequestPlane, RequestServer

Die = Callable[[], Awaitable[None]]
"""Kill the worker: it serves no longer, and says no more."""


@dataclass
class Wire:
    """One plane under test: ``serve`` makes a worker reachable, and returns its address and its death.

    ``places`` are the workers' own ends of it, by address. ``close`` takes everything down, the workers' ends
    too. An ``open_timeout_s`` of a few hundredths keeps tests of silence short.
    """

    plane: RequestPlane
    serve: Callable[[RequestServer], Awaitable[tuple[str, Die]]]
    nowhere: str
    places: dict[str, Registration]
    close: Callable[[], Awaitable[None]]
