"""The wait queues of one model: parked requests, which are decided again after a change."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from kvrouter.core.constraints import QueuePolicy
from kvrouter.core.errors import AllWorkersBusy, RoutingRefused
from kvrouter.core.requests import ServiceLevel

TRIES_PER_TURN = 16
"""The most waiting requests that are decided again in one turn of the event loop."""

HEAD_TRIES = 8
"""How many of them are the first of the line, where a change came while the others were being called."""

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
    event loop, so that the loop is not blocked. Changes in the meantime are merged, and call all requests
    again afterwards; the first of the line are called at once, so that no later one takes what became free.
    """

    def __init__(self, *, places_max: int, call_soon: CallSoon) -> None:
        self._places_max = places_max
        self._call_soon = call_soon
        self._line: list[Ticket] = []
        """The tickets by their keys."""
        self._number = 0
        self._called: OrderKey | None = None
        """The key of the last request that was called for a change; None when all were."""
        self._last_to_call = 0
        self._has_changed = False
        self._head_is_due = False
        self._call_is_due = False

    def __len__(self) -> int:
        return len(self._line)

    @property
    def is_full(self) -> bool:
        """Whether the line has no free place."""
        return len(self._line) >= self._places_max

    def enter(
        self, on_called: Callable[[], None], level: ServiceLevel, *, now_s: float, slack_s: float = 0.0
    ) -> "Ticket":
        """Take a place in the line; ``on_called`` is called each time the request may try again. Of its class
        and priority, only requests that enter less than ``slack_s`` later may be called first.

        The caller leaves by :meth:`Ticket.leave`.
        """
        self._number += 1
        key = -level.strict_priority, now_s + slack_s - level.priority_s, self._number
        ticket = Ticket(self, key, on_called)
        insort(self._line, ticket, key=_KEY)
        return ticket

    def pulse(self) -> None:
        """Schedule ``on_called`` of every ticket."""
        if self._line:
            self._has_changed = self._head_is_due = True
            self._set_call()

    def forget(self, ticket: "Ticket") -> None:
        """Remove a ticket, if it is in the line."""
        at = bisect_left(self._line, ticket.key, key=_KEY)
        if at < len(self._line) and self._line[at] is ticket:
            del self._line[at]

    def _set_call(self) -> None:
        if not self._call_is_due:
            self._call_is_due = True
            self._call_soon(self._call)

    def _call(self) -> None:
        """Call the next requests of the line, without those that entered after the change, and the first of
        the line again after a further change.
        """
        self._call_is_due = False
        head: list[Ticket] = []
        first = 0
        if self._called is None:
            self._has_changed = False
            self._last_to_call = self._number
        else:
            first = bisect_right(self._line, self._called, key=_KEY)
            if self._head_is_due:
                head = self._line[: min(first, HEAD_TRIES)]
        self._head_is_due = False
        places = TRIES_PER_TURN - len(head)
        due = (ticket for ticket in self._line[first:] if ticket.key[-1] <= self._last_to_call)
        piece = [*islice(due, places + 1)]
        more = len(piece) > places
        self._called = piece[places - 1].key if more else None
        for ticket in (*head, *piece[:places]):
            ticket.on_called()
        if more or self._has_changed:
            self._set_call()


class Ticket:
    """One request's place in a line."""

    __slots__ = ("key", "line", "on_called")

    def __init__(self, line: WaitingLine, key: OrderKey, on_called: Callable[[], None]) -> None:
        self.line = line
        self.key = key
        self.on_called = on_called

    def leave(self) -> None:
        """Give the place back; idempotent."""
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
