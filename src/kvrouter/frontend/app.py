"""The front door: OpenAI's two generation routes, pages, and the routes of operators."""

from collections.abc import Mapping

from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.door import Door
from kvrouter.frontend.gauges import Gauges
from kvrouter.frontend.generate import GenerateRoutes
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.pages import SETTLE_S, Pages
from kvrouter.frontend.prepare import Hall
from kvrouter.frontend.readiness import Awaited, nobody_awaited
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel


class FrontDoor(Door):
    """A door over a router's own requests.

    Gauges of the fleet are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
        awaited: Awaited = nobody_awaited,
        settle_s: float = SETTLE_S,
    ) -> None:
        observed = FrontObserved(telemetry)
        hall = Hall(service, texts, observed, unknown_nvext=settings.unknown_nvext)
        bodies = Bodies(service, texts, observed, settings)
        generate = GenerateRoutes(service, hall, bodies, observed)
        admin = AdminRoutes(service, hall, bodies, observed, settings=settings)
        super().__init__(
            {"/v1/chat/completions": generate.chat, "/v1/completions": generate.completion},
            [*Pages(service, hall, telemetry, awaited, settle_s=settle_s).routes(), *admin.routes()],
            bodies=bodies,
            settings=settings,
            observed=observed,
        )
        gauges = (Gauges(telemetry, service).refresh, hall.refresh_gauge)
        self._ends = [telemetry.before_scrape(refresh) for refresh in gauges]

    def close(self) -> None:
        """Refresh no gauge and read no body any more."""
        for end in self._ends:
            end()
        self._bodies.close()
