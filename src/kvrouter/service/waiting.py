"""Where the requests of one model wait that nobody may take now, and one request's wait over its tries."""

import asyncio
from types import TracebackType
from typing import Self

from kvrouter.config.router import KvRouterConfig
from kvrouter.core.errors import AllWorkersBusy, RoutingRefused
from kvrouter.core.requests import GenerateRequest
from kvrouter.service.observed import ModelObserved
from kvrouter.service.placement import Placement
from kvrouter.service.waiting_room import Ticket, WaitingRoom

DOMAIN_WAITERS_MAX = 1024
"""How many requests may wait for a decode worker to join a domain; admission has its own limit."""


class Waiting:
    """The two rooms: ``admission`` for workers that are busy, ``domain`` for one that should join."""

    def __init__(self, config: KvRouterConfig, observed: ModelObserved) -> None:
        self.admission = WaitingRoom(places_max=config.admission_queue_max)
        self.domain = WaitingRoom(places_max=DOMAIN_WAITERS_MAX)
        self.observed = observed
        self._config = config

    def __len__(self) -> int:
        return len(self.admission) + len(self.domain)

    @property
    def request_timeout_s(self) -> float:
        """However long a room allows, nobody waits for longer."""
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
    """One request's wait, as a context manager: its place in a room is given back at the end."""

    __slots__ = ("_began_s", "_request", "_ticket", "_waiting")

    def __init__(self, waiting: Waiting, request: GenerateRequest) -> None:
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
        when it was not, and tell of a wait for its domain.
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
