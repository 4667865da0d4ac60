"""The HTTP application of a standalone router: bookings and prefills."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.app import HttpApp
from kvrouter.frontend.fleet_state import Gauges
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.pages import Pages, json_page
from kvrouter.frontend.prepare import Bodies, RequestPreparer
from kvrouter.frontend.standalone.calls import Calls, TokenRequestParser, parse_output
from kvrouter.service.bookings import Bookings
from kvrouter.service.prefill_dispatch import PrefillDispatch
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel


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

    def __init__(self, prefills: PrefillDispatch) -> None:
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


class RouterApp(HttpApp):
    """The HTTP app over decisions and bookings; with ``takes_prefills`` also over prefill legs.

    Gauges are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        bookings: Bookings,
        prefills: PrefillDispatch,
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
        lease_ttl_s: float,
        takes_prefills: bool,
    ) -> None:
        observed = FrontendInstrumentation(telemetry)
        preparer = RequestPreparer(service, texts, observed, unknown_nvext=settings.unknown_nvext)
        bodies = Bodies(service, texts, observed, settings)
        parser = TokenRequestParser(preparer)
        calls = Calls(
            service, preparer, parser, bodies, bookings, prefills, observed, lease_ttl_s=lease_ttl_s
        )
        by_path = {"/v1/route": calls.route}
        routes = [
            *Pages(service, preparer, telemetry).routes(),
            *AdminRoutes(service, preparer, bodies, observed, settings=settings).routes(),
            *BookingPages(bookings, bodies, lease_ttl_s=lease_ttl_s).routes(),
        ]
        if takes_prefills:
            by_path["/v1/prefill"] = calls.prefill
            routes.extend(PrefillPages(prefills).routes())
        super().__init__(by_path, routes, bodies=bodies, settings=settings, observed=observed)
        self._telemetry = telemetry
        self._bookings = bookings
        self._prefills = prefills
        self._ends = (
            telemetry.before_scrape(Gauges(telemetry, service).refresh),
            telemetry.before_scrape(self._refresh),
            telemetry.before_scrape(preparer.refresh_gauge),
        )

    def close(self) -> None:
        """Refresh no gauge and read no body any more."""
        for end in self._ends:
            end()
        self._bodies.close()

    def _refresh(self) -> None:
        self._telemetry.bookings.set(len(self._bookings))
        self._telemetry.prefills_active.set(len(self._prefills))
