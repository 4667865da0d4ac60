"""The admission queue: requests of one model wait in it until a worker may take them."""

import asyncio
from collections.abc import Callable

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.requests import GenerateRequest
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.placement.service_levels import waited_too_long
from kvrouter.kernel.placement.waiting_line import Ticket, WaitingLine
from kvrouter.router.instrumentation import ModelInstrumentation


class Wait:
    """The wait of one request until it is placed.

    Its line calls ``place``, and not the waiting task: so nobody is placed between a call and its try. The
    wait ends ``limit_s`` seconds after it began, even where its line allows more, and for a request with an
    objective after ``objective_s``.
    """

    __slots__ = (
        "_began_s",
        "_instrumentation",
        "_limit_s",
        "_objective_s",
        "_place",
        "_placed",
        "_placer",
        "_prompt",
        "_refused",
        "_request",
        "_ticket",
        "_timer",
    )

    def __init__(
        self,
        placer: Placer,
        request: GenerateRequest,
        prompt: Prompt,
        instrumentation: ModelInstrumentation,
        place: Callable[["Wait"], Placement],
        *,
        limit_s: float,
        objective_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._placer = placer
        self._request = request
        self._prompt = prompt
        self._instrumentation = instrumentation
        self._place = place
        self._limit_s = limit_s
        self._objective_s = objective_s
        self._began_s = loop.time()
        self._placed: asyncio.Future[Placement] = loop.create_future()
        self._refused: RoutingRefused | None = None
        self._ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def until_placed(self, refused: RoutingRefused | None) -> Placement:
        """Wait until a worker takes the request, which was ``refused``, or has to let others try first.

        Raises the last refusal where the settings allow no wait, the line is full, or the time is up, and
        SloUnreachable where the objective passed.
        """
        try:
            if refused is None:
                self._enter(self._placer.waiting.admission, is_tried=False)
            else:
                self._park(refused)
            return await self._placed
        finally:
            self._leave()

    @property
    def unclaimed(self) -> Placement | None:
        """The placement of a wait that was cancelled after it had ended."""
        placed = self._placed
        is_placed = placed.done() and not placed.cancelled() and placed.exception() is None
        return placed.result() if is_placed else None

    def waited_s(self, placement: Placement) -> float | None:
        """Return the seconds that a placed request spent in the admission line, or None for another line,
        where a wait for a topology domain is reported to the instrumentation.
        """
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._ticket is not None and self._ticket.line is self._placer.waiting.admission:
            return waited_s
        self._instrumentation.joined_domain(placement, waited_s=waited_s)
        return None

    def _called(self) -> None:
        """Try again; the task of the request gets the result."""
        if self._placed.done():
            return
        try:
            placement = self._place(self)
        except RoutingRefused as refused:
            try:
                self._park(refused)
            except RoutingRefused as final:
                self._fail(final)
        except Exception as error:  # noqa: BLE001 - raised where the request waits, and not to those behind
            self._fail(error)
        else:
            self._leave()
            self._placed.set_result(placement)

    def _park(self, refused: RoutingRefused) -> None:
        """Wait in the line for what ``refused`` says. Raises it where that is not possible."""
        line, limit_s = self._placer.waiting.line_for(refused)
        if limit_s <= 0:
            self._instrumentation.refused(refused, self._request)
            raise refused
        self._refused = refused
        ticket = self._ticket if self._ticket is not None and self._ticket.line is line else None
        if ticket is not None and ticket.has_place:
            return
        if line.is_full:
            self._instrumentation.refused(refused, self._request, no_place=True)
            raise refused
        if ticket is None:
            self._leave()
            self._enter(line, is_tried=True)
        else:
            ticket.take_place()
        limit_s = min(limit_s, self._limit_s)
        until_s = self._began_s + min(limit_s, self._objective_s)
        self._timer = asyncio.get_running_loop().call_at(
            until_s, self._time_is_up, self._objective_s <= limit_s
        )

    def _enter(self, line: WaitingLine, *, is_tried: bool) -> None:
        self._ticket = line.enter(
            self._called,
            self._request.service_level,
            now_s=asyncio.get_running_loop().time(),
            slack_s=self._placer.slack_s(self._request, self._prompt, now_s=self._began_s),
            is_tried=is_tried,
        )

    def _time_is_up(self, is_objective: bool) -> None:
        refused = self._refused
        if refused is None or self._placed.done():
            return
        if is_objective:
            refused = waited_too_long(refused, self._objective_s)
        self._instrumentation.refused(refused, self._request, timed_out=True)
        self._fail(refused)

    def _fail(self, error: Exception) -> None:
        self._leave()
        self._placed.set_exception(error)

    def _leave(self) -> None:
        """Leave the line; idempotent."""
        if self._ticket is not None:
            self._ticket.leave()
            self._ticket = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
