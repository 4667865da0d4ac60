"""When requests of a trace arrive: by time stamp, or in a closed loop, each turn after the answer before it.

The choice may turn a ranking round, so whatever is reported of a replay names it.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.request import TraceInfo, TraceRequest

Arrival = tuple[float, TraceRequest]
"""The second of an arrival, and the request."""


class Dispatch(Protocol):
    """The order and the moments of arrivals."""

    name: str
    """What reports call it."""

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError for a trace that cannot be sent like this."""

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield the arrivals that wait for nobody, in the order of time."""

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:
        """A request ended; return the arrivals that follow from that."""


class ByTimeStamp:
    """Requests arrive when the trace says, ``speedup`` times as fast."""

    def __init__(self, speedup: float = 1.0) -> None:
        if not 0.0 < speedup < float("inf"):
            raise ConfigError(f"speedup: {speedup} is not a number above 0", param="speedup")
        self.name = "by time stamp" if speedup == 1.0 else f"by time stamp, {speedup:g} times as fast"
        self.speedup = speedup

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError where some requests have no time of arrival."""
        if not info.has_times:
            raise ConfigError(
                f"dispatch: some requests of {info.format} have a delay after the answer before them and no "
                "time stamp; replay it with --dispatch closed",
                param="dispatch",
            )

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield every request."""
        return ((row.at_s / self.speedup, row) for row in trace)

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:  # noqa: ARG002 - the port's signature
        """Nobody waits for an answer."""
        return ()


class ClosedLoop:
    """A turn arrives its think time after the answer that it follows, however long that took. The first turn
    of a session arrives when the trace says. The trace is held whole.
    """

    name = "closed loop: a turn follows the answer before it after its think time"

    def __init__(self) -> None:
        self._followers: dict[int, list[TraceRequest]] = {}

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError where no turn follows an answer."""
        if not info.has_sessions:
            raise ConfigError(
                f"dispatch: {info.format} has no sessions, so no turn follows an answer; replay it by time "
                "stamp",
                param="dispatch",
            )

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield the requests that follow no other."""
        first: list[Arrival] = []
        for row in trace:
            if row.after is None:
                first.append((row.at_s, row))
            else:
                self._followers.setdefault(row.after, []).append(row)
        return iter(first)

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:
        """Those who waited for this answer think, and then ask."""
        return [(now_s + row.think_s, row) for row in self._followers.pop(number, ())]
