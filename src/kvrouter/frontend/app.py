"""The front door: one handler for the HTTP server, over the streaming routes and all the others."""

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as PageRequest
from starlette.responses import Response
from starlette.routing import Route

from kvrouter.config import FrontendSettings
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.errors import (
    MethodNotAllowed,
    UnknownPath,
    error_body,
    error_headers,
)
from kvrouter.frontend.gauges import Gauges
from kvrouter.frontend.generate import GenerateRoutes
from kvrouter.frontend.http import AsgiBridge, Handler, HttpServer, Limits, Request, Responder
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.pages import Pages
from kvrouter.frontend.prepare import Hall
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel


class FrontDoor:
    """Answers every request of one HTTP server: a :data:`~kvrouter.frontend.http.Handler`.

    The two generation routes run on the server's own streams; everything else is :attr:`pages`, an ASGI app.
    Gauges of the fleet are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self.observed = FrontObserved(telemetry)
        hall = Hall(service, texts, self.observed)
        generate = GenerateRoutes(service, hall, self.observed)
        self._streams: dict[str, Handler] = {
            "/v1/chat/completions": generate.chat,
            "/v1/completions": generate.completion,
        }
        token = settings.admin_token
        admin = AdminRoutes(
            service, hall, self.observed, token=None if token is None else token.get_secret_value()
        )
        self.pages = _page_app([*Pages(service, hall, telemetry).routes(), *admin.routes()])
        self._bridge = AsgiBridge(self.pages)
        self.close = telemetry.before_scrape(Gauges(telemetry, service).refresh)

    def server(self) -> HttpServer:
        """Return a server with this handler and the limits of the settings; it listens when it is told to."""
        settings = self._settings
        limits = Limits(
            header_bytes=settings.header_max_bytes,
            body_bytes=settings.body_max_bytes,
            pipelined_requests=settings.pipelined_requests_max,
            connections=settings.connections_max,
            header_s=settings.header_timeout_s,
            body_s=settings.body_timeout_s,
            idle_s=settings.idle_timeout_s,
            write_stall_s=settings.write_stall_s,
            high_water_bytes=settings.write_high_water_bytes,
            low_water_bytes=settings.write_low_water_bytes,
            overflow_bytes=settings.write_overflow_bytes,
        )
        return HttpServer(self, limits, observer=self.observed.http)

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        stream = self._streams.get(request.path)
        if stream is None:
            await self._bridge(request, responder)
        elif request.method == "POST":
            await stream(request, responder)
        else:
            error = MethodNotAllowed(f"{request.path} takes POST, not {request.method}", allow="POST")
            await responder.send(error.status_hint, error_headers(error), error_body(error))


def _page_app(routes: list[Route]) -> Starlette:
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _on_http_exception,
            KvrouterError: _on_error,
            Exception: _on_mistake,
        },
    )
    app.router.redirect_slashes = False  # a path is one page, not two
    return app


async def _on_http_exception(request: PageRequest, exc: Exception) -> Response:
    """What Starlette itself raises: a path or a method that is not there."""
    if isinstance(exc, HTTPException) and exc.status_code == 405:
        allow = (exc.headers or {}).get("Allow", "")
        return _error_page(
            MethodNotAllowed(f"{request.url.path} takes {allow}, not {request.method}", allow=allow)
        )
    return _error_page(UnknownPath(f"nothing is at {request.url.path}"))


async def _on_error(_: PageRequest, exc: Exception) -> Response:
    if not isinstance(exc, KvrouterError):
        raise exc
    return _error_page(exc)


async def _on_mistake(_: PageRequest, _exc: Exception) -> Response:
    """A mistake of ours: its message may quote the prompt, so it stays inside."""
    return _error_page(KvrouterError("the server failed to answer this request"))


def _error_page(error: KvrouterError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.status_hint, headers=headers)
