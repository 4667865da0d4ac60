"""When requests of a trace arrive: by time stamp, or in a closed loop, each after those that it waits for.

The choice may reverse a ranking, so all reports of a replay name it.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

Arrival = tuple[float, TraceRequest]
"""The second of an arrival, and the request."""

SPEEDUPS = (1e-6, 1e6)
"""The least and the most: beyond, times of arrival would be no numbers, or all equal."""


class Dispatch(Protocol):
    """The order and the moments of arrivals."""

    name: str
    """Its name in reports."""

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError for a trace that cannot be sent like this."""

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield the arrivals without a wait, in the order of time."""

    def arrived(self, number: int, now_s: float) -> Iterable[Arrival]:
        """A request arrived; return the arrivals that follow from that."""

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:
        """A request ended; return the arrivals that follow from that."""


class ByTimeStamp:
    """Requests arrive at the trace's times, ``speedup`` times as fast."""

    def __init__(self, speedup: float = 1.0) -> None:
        least, most = SPEEDUPS
        if not least <= speedup <= most:
            raise ConfigError(
                f"speedup: {speedup} is not a number from {least:g} to {most:g}", param="speedup"
            )
        self.name = "by time stamp" if speedup == 1.0 else f"by time stamp, {speedup:g} times as fast"
        self.speedup = speedup

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError where some requests have no time of arrival."""
        if not info.has_times:
            raise ConfigError(
                f"dispatch: some requests of {info.format} have a delay after the answers that they wait for "
                "and no time stamp; replay it with --dispatch closed",
                param="dispatch",
            )

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield every request."""
        return ((request.at_s / self.speedup, request) for request in trace)

    def arrived(self, number: int, now_s: float) -> Iterable[Arrival]:  # noqa: ARG002 - the port's signature
        """Nobody waits for a request."""
        return ()

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:  # noqa: ARG002 - the port's signature
        """Nobody waits for an answer."""
        return ()


class _Waiting:
    """A request that waits for ``n_left`` others, and the earliest second at which it may come so far."""

    __slots__ = ("at_s", "n_left", "row")

    def __init__(self, request: TraceRequest) -> None:
        self.row = request
        self.n_left = len(request.waits)
        self.at_s = request.not_before_s


class ClosedLoop:
    """A request arrives its think time after the request that it waits for, however long that took: after the
    last of several. One without a wait arrives at the trace's time. A failed request ends the wait too. The
    trace is held whole.
    """

    name = "closed loop: a turn follows the answers that it waits for after its think time"

    def __init__(self) -> None:
        self._for_answer: dict[int, list[tuple[_Waiting, float]]] = {}
        self._for_arrival: dict[int, list[tuple[_Waiting, float]]] = {}

    def check(self, info: TraceInfo) -> None:
        """Raise ConfigError where no request waits for another."""
        if not info.has_sessions:
            raise ConfigError(
                f"dispatch: {info.format} has no sessions, so no turn follows an answer; replay it by time "
                "stamp",
                param="dispatch",
            )

    def arrivals(self, trace: Iterable[TraceRequest]) -> Iterator[Arrival]:
        """Yield the requests that wait for no other."""
        first: list[Arrival] = []
        for request in trace:
            if not request.waits:
                first.append((request.at_s, request))
                continue
            waiting = _Waiting(request)
            for wait in request.waits:
                others = self._for_arrival if wait.for_arrival else self._for_answer
                others.setdefault(wait.number, []).append((waiting, wait.think_s))
        return iter(first)

    def arrived(self, number: int, now_s: float) -> Iterable[Arrival]:
        """Return the requests that waited only for this request."""
        return _come(self._for_arrival.pop(number, ()), now_s)

    def ended(self, number: int, now_s: float) -> Iterable[Arrival]:
        """Return the requests that waited only for this answer."""
        return _come(self._for_answer.pop(number, ()), now_s)


def _come(waiting: Iterable[tuple[_Waiting, float]], now_s: float) -> list[Arrival]:
    """Take one from what each of them waits for; return those that come now."""
    come: list[Arrival] = []
    for each, think_s in waiting:
        each.at_s = max(each.at_s, now_s + think_s)
        each.n_left -= 1
        if not each.n_left:
            come.append((each.at_s, each.row))
    return come
