"""The admission queue: requests of one model that no worker may take now."""

import asyncio
from types import TracebackType
from typing import Self

from kvrouter.config.router import KvRouterConfig
from kvrouter.core.errors import AllWorkersBusy, RoutingRefused
from kvrouter.core.requests import GenerateRequest
from kvrouter.service.attempt import Placement
from kvrouter.service.instrumentation import ModelInstrumentation

TRIES_PER_TURN = 16
"""How many of those who wait are decided afresh in one turn of the event loop."""


class WaitingRoom:
    """Parks requests until something changes; one that is called is decided again, and keeps its place.

    A change calls the whole line, once: ``TRIES_PER_TURN`` in a turn of the event loop, which so stays free
    however many wait. Changes that come meanwhile count as one, and call the line again after that.
    """

    def __init__(self, *, places_max: int) -> None:
        self._places_max = places_max
        self._line: dict[int, Ticket] = {}
        self._number = 0
        self._called = 0
        self._last_to_call = 0
        self._has_changed = False
        self._call_is_due = False

    def __len__(self) -> int:
        return len(self._line)

    @property
    def is_full(self) -> bool:
        """True when one more request would be one too many."""
        return len(self._line) >= self._places_max

    def enter(self) -> "Ticket":
        """Take the last place in the line; the caller leaves by :meth:`Ticket.leave`."""
        self._number += 1
        ticket = self._line[self._number] = Ticket(self, self._number)
        return ticket

    def pulse(self) -> None:
        """Something changed: those who wait may try again."""
        if self._line:
            self._has_changed = True
            self._call_soon()

    def forget(self, number: int) -> None:
        """A ticket was given back."""
        self._line.pop(number, None)

    def _call_soon(self) -> None:
        if not self._call_is_due:
            self._call_is_due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        """Call the next piece of the line; one that came after the change has seen it already."""
        self._call_is_due = False
        if self._called >= self._last_to_call:
            self._has_changed = False
            self._called, self._last_to_call = 0, self._number
        first, last = self._called, self._last_to_call
        piece = [ticket for number, ticket in self._line.items() if first < number <= last]
        for ticket in piece[:TRIES_PER_TURN]:
            ticket.call()
        more = len(piece) > TRIES_PER_TURN
        self._called = piece[TRIES_PER_TURN - 1].number if more else last
        if more or self._has_changed:
            self._call_soon()


class Ticket:
    """One request's place in the line."""

    __slots__ = ("_future", "number", "room")

    def __init__(self, room: WaitingRoom, number: int) -> None:
        self.room = room
        self.number = number
        self._future: asyncio.Future[None] | None = None

    async def wait(self, *, until_s: float) -> bool:
        """Wait to be called; False when the loop's clock showed ``until_s`` first."""
        loop = asyncio.get_running_loop()
        if loop.time() >= until_s:
            return False
        self._future = loop.create_future()
        try:
            async with asyncio.timeout_at(until_s):
                await self._future
        except TimeoutError:
            return False
        finally:
            self._future = None
        return True

    def call(self) -> None:
        """Let the request try again; one that is trying already sees the change by itself."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def leave(self) -> None:
        """Give the place back; idempotent."""
        self.room.forget(self.number)


DOMAIN_WAITERS_MAX = 1024
"""How many requests may wait for a decode worker to join a domain; admission has its own limit."""


class AdmissionQueue:
    """The two waiting rooms: ``admission`` for workers that are busy, ``domain`` for one that should join."""

    def __init__(self, config: KvRouterConfig, observed: ModelInstrumentation) -> None:
        self.admission = WaitingRoom(places_max=config.admission_queue_max)
        self.domain = WaitingRoom(places_max=DOMAIN_WAITERS_MAX)
        self.observed = observed
        self._config = config

    def __len__(self) -> int:
        return len(self.admission) + len(self.domain)

    @property
    def request_timeout_s(self) -> float:
        """However long a waiting room allows, nobody waits for longer."""
        return self._config.request_timeout_s

    def room_for(self, refused: RoutingRefused) -> tuple[WaitingRoom, float]:
        """Where such a refusal may wait, and for how many seconds; 0: nowhere."""
        config = self._config
        if isinstance(refused, AllWorkersBusy):
            return self.admission, config.admission_wait_s if config.admission_queue_max else 0.0
        if refused.domain is not None:
            return self.domain, config.router_domain_wait_s
        return self.domain, 0.0

    def begin(self, request: GenerateRequest) -> "Wait":
        """A request is to be placed, and may have to wait."""
        return Wait(self, request)


class Wait:
    """One request's wait, as a context manager: its place in a waiting room is given back at the end."""

    __slots__ = ("_began_s", "_request", "_ticket", "_waiting")

    def __init__(self, waiting: AdmissionQueue, request: GenerateRequest) -> None:
        self._waiting = waiting
        self._request = request
        self._began_s = asyncio.get_running_loop().time()
        self._ticket: Ticket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    async def for_change(self, refused: RoutingRefused) -> None:
        """Return when something changed; raise ``refused`` where the settings allow no wait, no place is
        free, or time is up.
        """
        waiting, request = self._waiting, self._request
        room, limit_s = waiting.room_for(refused)
        if limit_s <= 0:
            waiting.observed.refused(refused, request)
            raise refused
        ticket = self._ticket
        if ticket is None or ticket.room is not room:
            self._leave()
            if room.is_full:
                waiting.observed.refused(refused, request, no_place=True)
                raise refused
            ticket = self._ticket = room.enter()
        if not await ticket.wait(until_s=self._began_s + min(limit_s, waiting.request_timeout_s)):
            waiting.observed.refused(refused, request, timed_out=True)
            raise refused

    def was_for(self, placement: Placement) -> float | None:
        """The request was placed at last: return for how many seconds it was in the admission queue, None
        when it was not, and report a wait for its domain.
        """
        if self._ticket is None:
            return None
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._ticket.room is self._waiting.admission:
            return waited_s
        self._waiting.observed.joined_domain(placement, waited_s=waited_s)
        return None

    def _leave(self) -> None:
        if self._ticket is not None:
            self._ticket.leave()
            self._ticket = None
