"""The wait queues of one model: parked requests, which are decided again after a change."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from kvrouter.core.constraints import QueuePolicy
from kvrouter.core.errors import AllWorkersBusy, RoutingRefused
from kvrouter.core.requests import ServiceLevel

TRIES_PER_TURN = 16
"""The most waiting requests that are decided again in one turn of the event loop."""

HEAD_TRIES = 8
"""How many of them may be refused at the head of the line, where a change came while others were called."""

DOMAIN_WAITERS_MAX = 1024
"""The most requests that wait for a decode worker to join a domain; admission has a separate limit."""

OrderKey = tuple[int, float, int]
"""The position in a line: the negative strict priority, the time of entry with its slack less the priority,
the number.
"""

CallSoon = Callable[[Callable[[], None]], object]
"""A function that schedules a call for the next turn of the event loop, or of a simulation."""


class WaitingLine:
    """Parks requests until a change; a request that is called is decided again, and keeps its place.

    Requests of a higher strict priority come first, and of one class those that entered earlier, by their
    priority and slack in seconds. A change calls each request once, ``TRIES_PER_TURN`` in a turn of the
    event loop, so that the loop is not blocked. After a change in the meantime the first of the line are
    called before the calls go on, so that no later one takes what became free; and while calls are due, a
    newcomer enters the line before its first try.
    """

    def __init__(self, *, places_max: int, call_soon: CallSoon) -> None:
        self._places_max = places_max
        self._call_soon = call_soon
        self._line: list[Ticket] = []
        """The tickets by their keys."""
        self._due: list[Ticket] = []
        """Those of them that are to be called, by their keys."""
        self._number = 0
        self._n_places = 0
        self._called: OrderKey | None = None
        """The key of the last request that was called, while later ones are due; else None."""
        self.has_calls_due = False

    def __len__(self) -> int:
        return len(self._line)

    @property
    def is_full(self) -> bool:
        """Whether the line has no free place."""
        return self._n_places >= self._places_max

    def enter(
        self,
        on_called: Callable[[], None],
        level: ServiceLevel,
        *,
        now_s: float,
        slack_s: float = 0.0,
        is_tried: bool = True,
    ) -> "Ticket":
        """Enter the line; ``on_called`` is called each time the request may try again. Of its class and
        priority, only requests that enter less than ``slack_s`` later may be called first. A request that did
        not try yet is called also without a change, and has no place until :meth:`Ticket.take_place`.

        The caller leaves by :meth:`Ticket.leave`.
        """
        self._number += 1
        key = -level.strict_priority, now_s + slack_s - level.priority_s, self._number
        ticket = Ticket(self, key, on_called)
        insort(self._line, ticket, key=_KEY)
        if is_tried:
            ticket.take_place()
        else:
            insort(self._due, ticket, key=_KEY)
            self._set_call()
        return ticket

    def pulse(self) -> None:
        """Schedule ``on_called`` of every ticket."""
        if len(self._due) < len(self._line):
            self._due = self._line.copy()
        if self._due:
            self._set_call()

    def take_place(self) -> None:
        """Count a ticket's place."""
        self._n_places += 1

    def forget(self, ticket: "Ticket") -> None:
        """Remove a ticket that is in the line."""
        del self._line[bisect_left(self._line, ticket.key, key=_KEY)]
        self._no_longer_due(ticket)
        self._n_places -= ticket.has_place

    def _set_call(self) -> None:
        if not self.has_calls_due:
            self.has_calls_due = True
            self._call_soon(self._call)

    def _call(self) -> None:
        """Call the next requests that did not try since the last change, and those before them first."""
        self.has_calls_due = False
        first = 0 if self._called is None else bisect_right(self._due, self._called, key=_KEY)
        n_due, head = len(self._due), self._due[: min(first, TRIES_PER_TURN)]
        later = self._due[first : first + TRIES_PER_TURN]
        n_head = n_refused = 0
        while n_head < len(head) and n_refused < HEAD_TRIES:
            n_refused += self._is_refused(head[n_head])
            n_head += 1
        del later[TRIES_PER_TURN - n_head :]
        for ticket in later:
            self._is_refused(ticket)
        if first + len(later) == n_due:
            self._called = None
        elif later:
            self._called = later[-1].key
        if self._due:
            self._set_call()

    def _is_refused(self, ticket: "Ticket") -> bool:
        """Call a ticket. Return whether it is still in the line."""
        self._no_longer_due(ticket)
        ticket.on_called()
        return ticket.is_in_line

    def _no_longer_due(self, ticket: "Ticket") -> None:
        at = bisect_left(self._due, ticket.key, key=_KEY)
        if self._due[at : at + 1] == [ticket]:
            del self._due[at]


class Ticket:
    """One request in a line."""

    __slots__ = ("has_place", "is_in_line", "key", "line", "on_called")

    def __init__(self, line: WaitingLine, key: OrderKey, on_called: Callable[[], None]) -> None:
        self.line = line
        self.key = key
        self.on_called = on_called
        self.has_place = False
        self.is_in_line = True

    def take_place(self) -> None:
        """Take one of the line's places."""
        self.has_place = True
        self.line.take_place()

    def leave(self) -> None:
        """Leave the line, and give the place back; idempotent."""
        if self.is_in_line:
            self.is_in_line = False
            self.line.forget(self)


_KEY = attrgetter("key")


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """The most waiting requests, and the most seconds to wait; with 0 seconds they are refused at once.
    ``policy`` orders them; ``request_timeout_s`` is the time limit of any request.
    """

    admission_places_max: int
    admission_wait_s: float
    domain_wait_s: float
    policy: QueuePolicy
    request_timeout_s: float


class WaitingLines:
    """The two lines: ``admission`` for busy workers, ``domain`` for a missing decode worker of a domain."""

    def __init__(self, limits: WaitingLimits, call_soon: CallSoon) -> None:
        self.admission = WaitingLine(places_max=limits.admission_places_max, call_soon=call_soon)
        self.domain = WaitingLine(places_max=DOMAIN_WAITERS_MAX, call_soon=call_soon)
        self.limits = limits

    def __len__(self) -> int:
        return len(self.admission) + len(self.domain)

    def line_for(self, refused: RoutingRefused) -> tuple[WaitingLine, float]:
        """Return the line where a refused request may wait, and for how many seconds; 0 for none."""
        limits = self.limits
        if isinstance(refused, AllWorkersBusy):
            return self.admission, limits.admission_wait_s if limits.admission_places_max else 0.0
        if refused.domain is not None:
            return self.domain, limits.domain_wait_s
        return self.domain, 0.0
