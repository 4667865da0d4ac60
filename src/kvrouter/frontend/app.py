"""The HTTP application: dispatches generation routes, pages and admin routes."""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as PageRequest
from starlette.responses import Response
from starlette.routing import Route

from kvrouter.config import FrontendSettings
from kvrouter.config.setting import installed_version
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import ModelName
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.compressed import CompressedBodies
from kvrouter.frontend.errors import MethodNotAllowed, UnknownPath, error_body, error_headers
from kvrouter.frontend.fleet_state import Gauges
from kvrouter.frontend.generate import GenerateRoutes
from kvrouter.frontend.http import (
    UPLOAD_TOO_SLOW,
    UPLOADS_FULL,
    AsgiBridge,
    BadRequest,
    BodyLimit,
    Handler,
    HttpEvent,
    HttpServer,
    Limits,
    Request,
    Responder,
)
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openapi import Described
from kvrouter.frontend.pages import SETTLE_S, Awaited, Pages, nobody_awaited
from kvrouter.frontend.prepare import BODY_BYTES_MAX, Bodies, RequestPreparer
from kvrouter.frontend.web_page import WebPage
from kvrouter.service.router import RouterService
from kvrouter.service.traffic import TrafficRecorder
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestTracing

ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://[^/\s,*]+")
LEGS = (b"prefill", b"decode")
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = b", ".join(
    (
        b"x-request-id",
        b"retry-after",
        *(b"x-kvrouter-%b-%b" % (leg, what) for leg in LEGS for what in (b"worker", b"dp-rank", b"domain")),
        b"x-kvrouter-overlap-blocks",
    )
)
"""What of an answer's headers a page may read apart from those that any may."""

UNREAD_STATUSES = frozenset({413, 431})
UNREAD_CODES = frozenset({UPLOADS_FULL, UPLOAD_TOO_SLOW})
"""What the HTTP server refuses of calls, because of their size."""

PAGES_WITH_PROMPTS = frozenset({"/v1/route/explain"})

_ErrorOf: TypeAlias = Callable[[PageRequest, Exception], KvrouterError]
_Answer: TypeAlias = Callable[[PageRequest, Exception], Awaitable[Response]]


class Cors:
    """What browsers are answered about pages of other origins; ``origins`` as the setting has them.

    Raises ConfigError for what is no origin: browsers compare them letter by letter.
    """

    def __init__(self, origins: str) -> None:
        self._origins = frozenset(each.strip().encode() for each in origins.split(",") if each.strip())
        for origin in self._origins - {b"*"}:
            if ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"--cors-origins: {origin.decode()!r} is no origin: a scheme, a host and perhaps a port, "
                    "as in https://chat.example.com",
                    param="cors_origins",
                )

    def headers(self, request: Request) -> ResponseHeaders:
        """The headers of any answer: a page of an origin that may call is shown it."""
        vary = () if b"*" in self._origins else ((b"vary", b"origin"),)
        origin = self._admitted(request)
        if origin is None:
            return vary
        exposed = (b"access-control-expose-headers", EXPOSED_HEADERS)
        return ((b"access-control-allow-origin", origin), exposed, *vary)

    def preflight(self, request: Request) -> ResponseHeaders:
        """More headers of the answer to the question whether a page may send what it wants to."""
        if self._admitted(request) is None:
            return ()
        asked = (request.header("access-control-request-headers") or "").encode("latin-1")
        headers = (b"access-control-allow-headers", asked) if asked else (b"vary", b"origin")
        return ((b"access-control-allow-methods", METHODS), headers, (b"access-control-max-age", b"3600"))

    def _admitted(self, request: Request) -> bytes | None:
        origin = (request.header("origin") or "").encode("latin-1")
        if not origin:
            return None
        if b"*" in self._origins:
            return b"*"
        return origin if origin in self._origins else None


class HttpApp:
    """Answers every request of one HTTP server: a :data:`~kvrouter.frontend.http.Handler`.

    ``calls`` are POSTs by path that run on the server's own streams; everything else is :attr:`pages`, an
    ASGI app.
    """

    def __init__(
        self,
        calls: Mapping[str, Handler],
        routes: Iterable[Route],
        *,
        bodies: Bodies,
        settings: FrontendSettings,
        observed: FrontendInstrumentation,
        traffic: TrafficRecorder | None,
    ) -> None:
        self.observed = observed
        routes = list(routes)
        described = Described(calls, routes, version=installed_version())
        self.pages = _page_app([*routes, *described.routes()], observed)
        self._settings = settings
        self._bodies = bodies
        self._calls = calls
        self._traffic = traffic
        self._bridge = AsgiBridge(self.pages)
        self._compressed = CompressedBodies(settings.uploads_max_bytes)
        self._cors = None if settings.cors_origins is None else Cors(settings.cors_origins)

    def server(self, *, connections_max: int, descriptors_max: int, refused_max: int) -> HttpServer:
        """Return a server with this handler and the limits of the settings; it listens once it is started.

        ``connections_max`` of the settings may be more than the system has room for, so it is given, with
        the number from which on the process keeps file descriptors for itself, and how many of these may
        go to connections that were refused.
        """
        settings = self._settings
        limits = Limits(
            header_bytes=settings.header_max_bytes,
            body_bytes=settings.body_max_bytes or BODY_BYTES_MAX,
            body_limit=self._body_limit,
            uploads_bytes=settings.uploads_max_bytes,
            pipelined_requests=settings.pipelined_requests_max,
            connections=connections_max,
            descriptors=descriptors_max,
            refused_connections=refused_max,
            header_s=settings.header_timeout_s,
            body_s=settings.body_timeout_s,
            body_bytes_per_s=settings.upload_min_bytes_per_s,
            idle_s=settings.idle_timeout_s,
            write_stall_s=settings.write_stall_s,
            high_water_bytes=settings.write_high_water_bytes,
            low_water_bytes=settings.write_low_water_bytes,
            overflow_bytes=settings.write_overflow_bytes,
        )
        return HttpServer(
            self,
            limits,
            observer=self._connection_event,
            on_error=self.observed.error_answered,
            on_refused=self._refused,
        )

    def _connection_event(self, event: HttpEvent) -> None:
        """Count what happened on a connection."""
        self.observed.http_events.inc(event.value)
        if event is HttpEvent.CONNECTION_CLOSED:
            self.observed.http_connections.add(-1)
        elif event in {HttpEvent.CONNECTION_OPENED, HttpEvent.CONNECTION_REFUSED}:
            self.observed.http_connections.add(1)

    def _refused(self, fault: BadRequest) -> None:
        """Record, where that is asked for, a call that was too long, too slow or one too many to be read.
        Connections that are refused and bytes that are no HTTP may be anybody's, and as many as they like.
        """
        is_unread = fault.status in UNREAD_STATUSES or fault.code in UNREAD_CODES
        if self._traffic is not None and is_unread and fault.path in (None, *self._calls):
            self._traffic.unread_call_refused(fault.code, http_status=fault.status, route=fault.path)

    def _body_limit(self, path: str) -> BodyLimit:
        if path in self._calls or path in PAGES_WITH_PROMPTS:
            return self._bodies.prompt_limit()
        return self._bodies.page_limit()

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        if self._cors is not None:
            responder.more_headers = self._cors.headers(request)
        encoding = request.header("content-encoding")
        if encoding is None or encoding == "identity":
            await self._handle(request, responder)
            return
        try:
            limit = self._body_limit(request.path)
            await self._compressed.handle(encoding, limit, request, responder, self._handle)
        except KvrouterError as error:
            self.observed.failed(error)
            await responder.send(error.status_hint, error_headers(error), error_body(error))

    async def _handle(self, request: Request, responder: Responder) -> None:
        call = self._calls.get(request.path)
        if request.method == "OPTIONS":
            await self._options(request, responder)
        elif call is None:
            await self._bridge(request, responder)
        elif request.method == "POST":
            await call(request, responder)
        else:
            error = MethodNotAllowed(f"{request.path} takes POST, not {request.method}", allow="POST")
            self.observed.failed(error)
            await responder.send(error.status_hint, error_headers(error), error_body(error))

    async def _options(self, request: Request, responder: Responder) -> None:
        """Say which methods a path takes; a browser that asks for another origin's page, what it may send."""
        methods = {"POST"} if request.path in self._calls else {*_methods_of(self.pages, request.path)}
        if not methods:
            await self._bridge(request, responder)  # nothing is there
            return
        allow = ", ".join(sorted({"OPTIONS", *methods})).encode()
        preflight = () if self._cors is None else self._cors.preflight(request)
        await responder.send(204, ((b"allow", allow), *preflight))


def _methods_of(pages: Starlette, path: str) -> Iterator[str]:
    """Yield the methods of the pages at a path."""
    for route in pages.routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            yield from route.methods or ()


def _page_app(routes: list[Route], observed: FrontendInstrumentation) -> Starlette:
    def answering(error_of: _ErrorOf) -> _Answer:
        async def answer(request: PageRequest, exc: Exception) -> Response:
            error = error_of(request, exc)
            observed.failed(error, model=getattr(request.state, "model", None))
            headers = {name.decode(): value.decode() for name, value in error_headers(error)}
            return Response(error_body(error), error.status_hint, headers=headers)

        return answer

    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: answering(_of_http_exception),
            KvrouterError: answering(_of_ours),
            Exception: answering(_of_mistake),
        },
    )
    app.router.redirect_slashes = False  # a path is one page, not two
    return app


def _of_http_exception(request: PageRequest, exc: Exception) -> KvrouterError:
    """What Starlette itself raises: a path or a method that is not there."""
    if isinstance(exc, HTTPException) and exc.status_code == 405:
        allow = (exc.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{request.url.path} takes {allow}, not {request.method}", allow=allow)
    return UnknownPath(f"nothing is at {request.url.path}")


def _of_ours(_: PageRequest, exc: Exception) -> KvrouterError:
    if not isinstance(exc, KvrouterError):
        raise exc
    return exc


def _of_mistake(_: PageRequest, _exc: Exception) -> KvrouterError:
    """A mistake of ours: its message may quote the prompt, so it stays inside."""
    return KvrouterError("the server failed to answer this request")


class FrontendApp(HttpApp):
    """The HTTP app over a router's own requests.

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
        tracing: "RequestTracing | None" = None,
    ) -> None:
        observed = FrontendInstrumentation(telemetry)
        preparer = RequestPreparer(service, texts, observed, unknown_nvext=settings.unknown_nvext)
        bodies = Bodies(service, texts, observed, settings)
        generate = GenerateRoutes(service, preparer, bodies, observed, tracing)
        admin = AdminRoutes(service, preparer, bodies, observed, settings=settings)
        super().__init__(
            {
                "/v1/chat/completions": generate.chat,
                "/v1/completions": generate.completion,
                **generate.passed(),
            },
            [
                *Pages(service, preparer, telemetry, awaited, settle_s=settle_s).routes(),
                *admin.routes(),
                *WebPage().routes(),
            ],
            bodies=bodies,
            settings=settings,
            observed=observed,
            traffic=service.traffic,
        )
        gauges = (Gauges(telemetry, service).refresh, preparer.refresh_gauge)
        self._ends = [telemetry.before_scrape(refresh) for refresh in gauges]

    def close(self) -> None:
        """Refresh no gauge and read no body any more."""
        for end in self._ends:
            end()
        self._bodies.close()
        self._compressed.close()
