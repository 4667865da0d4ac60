"""The admission queue: requests of one model wait in it until a worker may take them."""

import asyncio

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.requests import DEFAULT_LEVEL, GenerateRequest, ServiceLevel
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.placement.service_levels import waited_too_long
from kvrouter.kernel.placement.waiting_line import Ticket, WaitingLine
from kvrouter.router.instrumentation import ModelInstrumentation


class QueuePlace:
    """One request's place in a waiting line; :meth:`wait` blocks until it is called."""

    def __init__(
        self, line: WaitingLine, level: ServiceLevel = DEFAULT_LEVEL, *, slack_s: float = 0.0
    ) -> None:
        self.line = line
        now_s = asyncio.get_running_loop().time()
        self._ticket: Ticket = line.enter(self._called, level, now_s=now_s, slack_s=slack_s)
        self._future: asyncio.Future[None] | None = None

    async def wait(self, *, until_s: float) -> bool:
        """Wait until the place is called; return False when the loop's clock reaches ``until_s`` first."""
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

    def leave(self) -> None:
        """Give the place back; idempotent."""
        self._ticket.leave()

    def _called(self) -> None:
        """Wake the waiting request; does nothing before :meth:`wait` and after it."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Wait:
    """The wait of one request over all its attempts to be placed; the owner calls :meth:`leave` at the end.

    The wait ends ``limit_s`` seconds after it began, even where its line allows more, and for a request with
    an objective after ``objective_s``.
    """

    __slots__ = ("_began_s", "_instrumentation", "_limit_s", "_objective_s", "_place", "_placer", "_request")

    def __init__(
        self,
        placer: Placer,
        request: GenerateRequest,
        instrumentation: ModelInstrumentation,
        *,
        limit_s: float,
        objective_s: float,
    ) -> None:
        self._placer = placer
        self._request = request
        self._instrumentation = instrumentation
        self._limit_s = limit_s
        self._objective_s = objective_s
        self._began_s = asyncio.get_running_loop().time()
        self._place: QueuePlace | None = None

    async def for_change(self, refused: RoutingRefused, prompt: Prompt) -> None:
        """Wait until a worker may have become free. Raises ``refused`` where the settings allow no wait, the
        line is full, or the time is up, and SloUnreachable where the objective passed.
        """
        instrumentation, request = self._instrumentation, self._request
        line, limit_s = self._placer.waiting.line_for(refused)
        if limit_s <= 0:
            instrumentation.refused(refused, request)
            raise refused
        place = self._place
        if place is None or place.line is not line:
            self.leave()
            if line.is_full:
                instrumentation.refused(refused, request, no_place=True)
                raise refused
            slack_s = self._placer.slack_s(request, prompt, now_s=self._began_s)
            place = self._place = QueuePlace(line, request.service_level, slack_s=slack_s)
        limit_s = min(limit_s, self._limit_s)
        if not await place.wait(until_s=self._began_s + min(limit_s, self._objective_s)):
            if self._objective_s <= limit_s:
                refused = waited_too_long(refused, self._objective_s)
            instrumentation.refused(refused, request, timed_out=True)
            raise refused

    def placed(self, placement: Placement) -> float | None:
        """End the wait of a placed request. Returns the seconds that it spent in the admission line, or None
        for another line or no wait; a wait for a topology domain is reported to the instrumentation.
        """
        if self._place is None:
            return None
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._place.line is self._placer.waiting.admission:
            return waited_s
        self._instrumentation.joined_domain(placement, waited_s=waited_s)
        return None

    def leave(self) -> None:
        """Give the place back; idempotent."""
        if self._place is not None:
            self._place.leave()
            self._place = None
