"""Calls about requests that were booked or prefilled here before. Each of them renews a booking."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvrouter.core.ids import RequestId
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.pages import json_page
from kvrouter.frontend.standalone.bodies import parse_output
from kvrouter.service.bookings import Bookings
from kvrouter.service.prefills import Prefills


class BookingPages:
    """The routes of what is booked; a draining router answers them too."""

    def __init__(self, bookings: Bookings, bodies: Bodies, *, lease_ttl_s: float) -> None:
        self._bookings = bookings
        self._bodies = bodies
        self._lease_ttl_s = lease_ttl_s

    def routes(self) -> list[Route]:
        """The table of these routes."""
        booked = "/v1/route/{request_id:path}"
        return [
            Route(f"{booked}/prefill_complete", self.prefill_complete, methods=["POST"]),
            Route(f"{booked}/output_blocks", self.output_blocks, methods=["POST"]),
            Route(f"{booked}/renew", self.renew, methods=["POST"]),
            Route(f"{booked}/free", self.free, methods=["POST", "DELETE"]),
            Route(booked, self.free, methods=["DELETE"]),
        ]

    async def prefill_complete(self, request: Request) -> Response:
        """``POST …/prefill_complete``: the first token is there."""
        self._bookings.first_token(_id_of(request))
        return self._renewed(request)

    async def output_blocks(self, request: Request) -> Response:
        """``POST …/output_blocks``: so many more blocks are full of output."""
        blocks = await self._bodies.read(await request.body(), parse_output)
        self._bookings.output_blocks(_id_of(request), blocks)
        return self._renewed(request)

    async def renew(self, request: Request) -> Response:
        """``POST …/renew``: the request still runs."""
        self._bookings.renew(_id_of(request))
        return self._renewed(request)

    async def free(self, request: Request) -> Response:
        """``POST`` or ``DELETE …/free``, or ``DELETE`` of the booking: the request has ended."""
        self._bookings.free(_id_of(request))
        return json_page({"request_id": _id_of(request), "booked": False, "lease_ttl_s": None})

    def _renewed(self, request: Request) -> Response:
        return json_page({"request_id": _id_of(request), "booked": True, "lease_ttl_s": self._lease_ttl_s})


class PrefillPages:
    """The routes of prefills that run, or whose KV waits."""

    def __init__(self, prefills: Prefills) -> None:
        self._prefills = prefills

    def routes(self) -> list[Route]:
        """The table of these routes."""
        return [Route("/v1/prefill/{request_id:path}", self.let_go, methods=["DELETE"])]

    async def let_go(self, request: Request) -> Response:
        """``DELETE /v1/prefill/{request_id}``: no decode worker will fetch the KV."""
        self._prefills.let_go(_id_of(request))
        return json_page({"request_id": _id_of(request)})


def _id_of(request: Request) -> RequestId:
    return RequestId(request.path_params["request_id"])
