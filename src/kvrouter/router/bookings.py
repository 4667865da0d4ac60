"""Bookings of a standalone router: load that counts until it is freed or its time to live (TTL) ends."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.core.errors import InvalidRequest, NotFound, ShuttingDown, Unavailable
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest
from kvrouter.kernel.placement.placement import Placement
from kvrouter.router.model_router import ModelRouter

BOOKINGS_MAX = 65_536
"""The most requests that may be booked at a time."""


class RequestInUse(InvalidRequest):
    """The request id is running, is being booked, or is booked already."""

    status_hint = 409
    code = "request_in_use"


class NotBooked(NotFound):
    """No booking of this request id exists: it was never made, was freed, or its TTL ended."""

    code = "request_not_booked"


class BookingsFull(Unavailable):
    """The maximum number of requests is booked."""

    code = "bookings_full"


@dataclass(slots=True)
class _Booking:
    model: ModelRouter
    placement: Placement
    renewed_s: float
    """When its owner last made a call about it, on the loop's clock."""


class Bookings:
    """Load of requests that another program sends to the workers, held until it is freed.

    With ``lease_ttl_s`` a booking lapses that many seconds after the last call about it, and ``on_lapsed`` is
    called: an owner that died leaves no load behind.
    """

    def __init__(
        self,
        *,
        bookings_max: int = BOOKINGS_MAX,
        lease_ttl_s: float | None = None,
        on_lapsed: Callable[[ModelName, Placement], None] | None = None,
    ) -> None:
        self._bookings_max = bookings_max
        self._lease_ttl_s = lease_ttl_s
        self._on_lapsed = on_lapsed
        self._held: OrderedDict[RequestId, _Booking] = OrderedDict()
        """The booking with the oldest last call comes first."""
        self._in_use: set[RequestId] = set()
        """Ids that are running, being booked, or booked."""
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._held)

    def claim(self, request_id: RequestId) -> None:
        """Reserve the id until :meth:`give_back`; raise :class:`RequestInUse` when it is taken."""
        self.refuse_when_in_use(request_id)
        self._in_use.add(request_id)

    def give_back(self, request_id: RequestId) -> None:
        """Free the id; idempotent."""
        self._in_use.discard(request_id)

    def refuse_when_in_use(self, request_id: RequestId) -> None:
        """Raise :class:`RequestInUse` when the id is taken."""
        if request_id in self._held:
            raise RequestInUse(
                f"request_id: {request_id!r} is booked already; free it first", param="request_id"
            )
        if request_id in self._in_use:
            raise RequestInUse(f"request_id: {request_id!r} runs already", param="request_id")

    async def book(self, model: ModelRouter, request: GenerateRequest) -> Placement:
        """Choose a worker and hold its load until it is freed; may wait as long as the settings allow.

        Raises :class:`RoutingRefused`, :class:`RequestInUse`, :class:`BookingsFull`, and
        :class:`ShuttingDown` when :meth:`close` was called meanwhile.
        """
        self.claim(request.request_id)
        try:
            self._refuse_when_full()
            placement = await model.place(request, request.token_ids, attempt=0, excluded=frozenset())
            try:
                self._refuse_when_full()
            except BaseException:
                model.release(placement)
                raise
        except BaseException:
            self.give_back(request.request_id)
            raise
        self._held[request.request_id] = _Booking(model, placement, asyncio.get_running_loop().time())
        self._empty.clear()
        self._set_timer()
        return placement

    def renew(self, request_id: RequestId) -> Placement:
        """Restart the booking's TTL and return its placement. Raises :class:`NotBooked`."""
        return self._renewed(request_id).placement

    def first_token(self, request_id: RequestId) -> Placement:
        """Move the request's load from prefill to decode. Raises :class:`NotBooked`."""
        booking = self._renewed(request_id)
        booking.model.first_token(booking.placement)
        return booking.placement

    def output_blocks(self, request_id: RequestId, blocks: int) -> Placement:
        """Add ``blocks`` full blocks of output to the request's load. Raises :class:`NotBooked`."""
        booking = self._renewed(request_id)
        model = booking.model
        model.placer.output_blocks(booking.placement, blocks, now_s=model.clock())
        return booking.placement

    def free(self, request_id: RequestId) -> Placement:
        """Free the booking and return its placement. Raises :class:`NotBooked`."""
        self._renewed(request_id)
        return self._free(request_id)

    def close(self) -> None:
        """Free all bookings and refuse new ones. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request_id in tuple(self._held):
            self._free(request_id)

    async def wait_empty(self, limit_s: float) -> int:
        """Wait until no booking is left, for at most ``limit_s`` seconds; return how many are left."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return len(self._held)

    def _renewed(self, request_id: RequestId) -> _Booking:
        booking = self._held.get(request_id)
        if booking is None:
            raise NotBooked(f"request_id: {request_id!r} is not booked", param="request_id")
        if self._lease_ttl_s is not None:
            booking.renewed_s = asyncio.get_running_loop().time()
            self._held.move_to_end(request_id)
        return booking

    def _free(self, request_id: RequestId) -> Placement:
        booking = self._held.pop(request_id)
        self.give_back(request_id)
        booking.model.release(booking.placement)
        if not self._held:
            self._empty.set()
        return booking.placement

    def _set_timer(self) -> None:
        """Set the timer for the first TTL to end; it does nothing to a booking that was renewed meanwhile."""
        if self._lease_ttl_s is None or self._timer is not None or not self._held:
            return
        first = next(iter(self._held.values()))
        self._timer = asyncio.get_running_loop().call_at(first.renewed_s + self._lease_ttl_s, self._lapse)

    def _lapse(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._held and self._lease_ttl_s is not None:
            request_id, booking = next(iter(self._held.items()))
            if booking.renewed_s + self._lease_ttl_s > now_s:
                break
            self._free(request_id)
            if self._on_lapsed is not None:
                self._on_lapsed(booking.model.fleet.model, booking.placement)
        self._set_timer()

    def _refuse_when_full(self) -> None:
        if self._is_closed:
            raise ShuttingDown("this router was closed: nothing more is booked")
        if len(self._held) >= self._bookings_max:
            raise BookingsFull(f"{self._bookings_max} requests are booked; free some")
