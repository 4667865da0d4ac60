"""The admission queue: a request of one model waits in it while no worker may take it."""

import asyncio

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.requests import GenerateRequest
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.waiting_line import Ticket, WaitingLine, WaitingLines
from kvrouter.router.instrumentation import ModelInstrumentation


class QueuePlace:
    """A request's place in a waiting line, to await."""

    def __init__(self, line: WaitingLine) -> None:
        self.line = line
        self._ticket: Ticket = line.enter(self._called)
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

    def leave(self) -> None:
        """Give the place back; idempotent."""
        self._ticket.leave()

    def _called(self) -> None:
        """Let the request try again; one that is trying already sees the change by itself."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Wait:
    """One request's wait; its owner calls :meth:`leave` at the end, which gives its place in a line back.

    However long its line allows, it waits no longer than ``limit_s`` seconds from its beginning.
    """

    __slots__ = ("_began_s", "_instrumentation", "_limit_s", "_lines", "_place", "_request")

    def __init__(
        self,
        lines: WaitingLines,
        request: GenerateRequest,
        instrumentation: ModelInstrumentation,
        *,
        limit_s: float,
    ) -> None:
        self._lines = lines
        self._request = request
        self._instrumentation = instrumentation
        self._limit_s = limit_s
        self._began_s = asyncio.get_running_loop().time()
        self._place: QueuePlace | None = None

    async def for_change(self, refused: RoutingRefused) -> None:
        """Return when something changed; raise ``refused`` where the settings allow no wait, no place is
        free, or time is up.
        """
        instrumentation, request = self._instrumentation, self._request
        line, limit_s = self._lines.line_for(refused)
        if limit_s <= 0:
            instrumentation.refused(refused, request)
            raise refused
        place = self._place
        if place is None or place.line is not line:
            self.leave()
            if line.is_full:
                instrumentation.refused(refused, request, no_place=True)
                raise refused
            place = self._place = QueuePlace(line)
        if not await place.wait(until_s=self._began_s + min(limit_s, self._limit_s)):
            instrumentation.refused(refused, request, timed_out=True)
            raise refused

    def placed(self, placement: Placement) -> float | None:
        """The request was placed at last: return for how many seconds it was in the admission line, None
        when it was not, and report a wait for its domain.
        """
        if self._place is None:
            return None
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._place.line is self._lines.admission:
            return waited_s
        self._instrumentation.joined_domain(placement, waited_s=waited_s)
        return None

    def leave(self) -> None:
        """Give the place back; idempotent."""
        if self._place is not None:
            self._place.leave()
            self._place = None
