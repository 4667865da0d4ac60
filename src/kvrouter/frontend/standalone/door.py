"""The door of a standalone router."""

from collections.abc import Mapping

from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.door import Door
from kvrouter.frontend.gauges import Gauges
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.pages import Pages
from kvrouter.frontend.prepare import Hall
from kvrouter.frontend.standalone.calls import Calls
from kvrouter.frontend.standalone.desk import Desk
from kvrouter.frontend.standalone.pages import BookingPages, PrefillPages
from kvrouter.service.bookings import Bookings
from kvrouter.service.prefills import Prefills
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel


class StandaloneDoor(Door):
    """A door over decisions and bookings; with ``takes_prefills`` also over prefill legs.

    Gauges are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        bookings: Bookings,
        prefills: Prefills,
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
        lease_ttl_s: float,
        takes_prefills: bool,
    ) -> None:
        observed = FrontObserved(telemetry)
        hall = Hall(service, texts, observed, unknown_nvext=settings.unknown_nvext)
        bodies = Bodies(service, texts, observed, settings)
        desk = Desk(hall)
        calls = Calls(service, hall, desk, bodies, bookings, prefills, observed, lease_ttl_s=lease_ttl_s)
        by_path = {"/v1/route": calls.route}
        routes = [
            *Pages(service, hall, telemetry).routes(),
            *AdminRoutes(service, hall, bodies, observed, settings=settings).routes(),
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
            telemetry.before_scrape(hall.refresh_gauge),
        )

    def close(self) -> None:
        """Refresh no gauge and read no body any more."""
        for end in self._ends:
            end()
        self._bodies.close()

    def _refresh(self) -> None:
        self._telemetry.bookings.set(len(self._bookings))
        self._telemetry.prefills_active.set(len(self._prefills))
