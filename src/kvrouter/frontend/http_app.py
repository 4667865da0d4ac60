"""The HTTP application: dispatches generation routes, pages and admin routes."""

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrouter.api.paths import EXPLAIN
from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.compressed import CompressedBodies
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.frontend.errors import (
    MethodNotAllowed,
    UnknownPath,
    anthropic_fault_body,
    error_body,
    error_headers,
    failure_body,
)
from kvrouter.frontend.fleet_state import ExpectedEngines, no_expected_engines
from kvrouter.frontend.gauges import Gauges
from kvrouter.frontend.generate import GenerateRoutes, trace_of
from kvrouter.frontend.http import (
    UPLOAD_TOO_SLOW,
    UPLOADS_FULL,
    BadRequest,
    BodyLimit,
    ErrorAnswer,
    Handler,
    HttpEvent,
    HttpServer,
    Limits,
    Request,
    Responder,
)
from kvrouter.frontend.http.response import CONNECTIONS_FULL, Headers, error_answer
from kvrouter.frontend.instrumentation import UNKNOWN_ROUTE, FrontendInstrumentation
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES
from kvrouter.frontend.openapi import DescriptionRoutes
from kvrouter.frontend.origins import Cors, FleetGuard, page_headers
from kvrouter.frontend.page_route import AdminRoute, Page, PageRequest, PublicRoute, Route
from kvrouter.frontend.prepare import BODY_BYTES_MAX, Bodies, RequestPreparer
from kvrouter.frontend.public_pages import SETTLE_S, Pages
from kvrouter.frontend.response_writer import usable_request_id
from kvrouter.frontend.web_page import WebPage
from kvrouter.router.router_service import RouterService
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.setting import installed_version
from kvrouter.settings.tree import FrontendSettings
from kvrouter.telemetry import Telemetry

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestTracing

UNREAD_STATUSES = frozenset({413, 431})
UNREAD_CODES = frozenset({UPLOADS_FULL, UPLOAD_TOO_SLOW})
"""Statuses and codes with which the HTTP server refuses calls that are too large or too slow."""

_ANTHROPIC_ROUTES = tuple(each.route.value for each in PASSED_ROUTES if each.is_anthropic)

CLIENT_CALLS = frozenset(route.value for route in CallRoute)
"""Paths of the calls that clients also send to engines."""

PAGES_WITH_PROMPTS = frozenset({EXPLAIN})


class HttpApp:
    """Answers every request of one HTTP server: a :data:`~kvrouter.frontend.http.Handler`.

    ``calls`` are the handlers of POSTs, by path, that write their own answers; :attr:`pages` are the rest.
    """

    def __init__(
        self,
        calls: Mapping[str, Handler],
        routes: Iterable[Route],
        *,
        bodies: Bodies,
        settings: FrontendSettings,
        instrumentation: FrontendInstrumentation,
        traffic: TrafficRecorder | None,
    ) -> None:
        self.instrumentation = instrumentation
        routes = list(routes)
        description_routes = DescriptionRoutes(calls, routes, version=installed_version())
        self.pages = [*routes, *description_routes.routes()]
        self._settings = settings
        self._bodies = bodies
        self._calls = calls
        self._traffic = traffic
        self._compressed = CompressedBodies(settings.uploads_max_bytes)
        self._cors = None if settings.cors_origins is None else Cors(settings.cors_origins)
        self._guard = FleetGuard(settings, self._cors)

    def server(self, *, connections_max: int, descriptors_max: int, refused_max: int) -> HttpServer:
        """Return a server with this handler and the limits of the settings; ``serve`` starts it.

        ``connections_max`` is the setting, capped by what the system allows. Connections with a file
        descriptor of at least ``descriptors_max`` are refused; at most ``refused_max`` refused ones linger.
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
            on_refused=self._fault_answered,
            on_failed=self._failure_answered,
        )

    def _connection_event(self, event: HttpEvent) -> None:
        """Count an event of a connection."""
        self.instrumentation.http_events.inc(event)
        if event is HttpEvent.CONNECTION_CLOSED:
            self.instrumentation.http_connections.add(-1)
        elif event is HttpEvent.CONNECTION_OPENED or event is HttpEvent.CONNECTION_REFUSED:
            self.instrumentation.http_connections.add(1)

    def _fault_answered(self, fault: BadRequest) -> ErrorAnswer:
        """Return the answer to a request that the server refuses before a handler.

        A recording gets calls that were too long, too slow, or over the budget of uploads. Refused
        connections and malformed HTTP are not recorded: strangers can send any number of them.
        """
        is_unread = fault.status in UNREAD_STATUSES or fault.code in UNREAD_CODES
        if self._traffic is not None and is_unread and fault.path in (None, *self._calls):
            self._traffic.unread_call_refused(fault.code, http_status=fault.status, route=fault.path)
        answer = self._failure_answered(fault)
        headers = (
            answer.headers if self._cors is None else (*answer.headers, *self._cors.fault_headers(fault))
        )
        if fault.code == CONNECTIONS_FULL:
            return ErrorAnswer(headers, answer.body)  # no request was read
        requested = fault.header(b"x-request-id").decode("latin-1")
        duration_s = 0.0 if fault.began_s is None else time.monotonic() - fault.began_s
        request_id = self._ended(
            fault.path, fault.headers, requested, duration_s=duration_s, status=fault.status, code=fault.code
        )
        return ErrorAnswer((*headers, request_id), answer.body)

    def _failure_answered(self, fault: BadRequest) -> ErrorAnswer:
        """Return the answer for a failed handler; the handler already logged the end of its call."""
        self.instrumentation.error_answered(fault.code)
        answer = error_answer(fault)
        if fault.path is None or not _is_anthropic(fault.path):
            return answer
        return ErrorAnswer(answer.headers, anthropic_fault_body(fault))

    def _ended(
        self,
        path: str | None,
        headers: Headers,
        requested_id: str | None,
        *,
        duration_s: float,
        status: int,
        code: str,
    ) -> tuple[bytes, bytes]:
        """Log and count a request that no handler answers; return the header with its id."""
        request_id = usable_request_id(requested_id)
        self.instrumentation.answered(
            route=UNKNOWN_ROUTE if path is None else self._route_of(path),
            model=None,
            status=status,
            request_id=request_id,
            trace=trace_of(headers),
            duration_s=duration_s,
            code=code,
        )
        return (b"x-request-id", request_id.encode())

    def _route_of(self, path: str) -> str:
        """Return the route at a path, as a metric label: its values are few."""
        path = self._without_slash(path)
        if path in self._calls:
            return path
        return next((route.path for route, _ in self._pages_at(path)), UNKNOWN_ROUTE)

    def _without_slash(self, path: str) -> str:
        """Return the path without a trailing slash, unless a route or a request id ends in one."""
        if not path.endswith("/"):
            return path
        bare = path.rstrip("/") or "/"
        if bare in self._calls:
            return bare
        for route, parameters in self._pages_at(path):
            if route.path.endswith("/") or parameters.get("request_id"):
                return path
        return bare

    def _pages_at(self, path: str) -> Iterator[tuple[Route, Mapping[str, str]]]:
        """Yield the pages at a path, each with the path's parameters."""
        for route in self.pages:
            parameters = route.match(path)
            if parameters is not None:
                yield route, parameters

    def _body_limit(self, path: str) -> BodyLimit:
        path = self._without_slash(path)
        if path in self._calls or path in PAGES_WITH_PROMPTS:
            return self._bodies.prompt_limit()
        return self._bodies.page_limit()

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        if request.head.path.endswith("/"):
            request.head = replace(request.head, path=self._without_slash(request.head.path))
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
            await self._refuse(error, request, responder)

    async def _handle(self, request: Request, responder: Responder) -> None:
        try:
            handler = self._handler_of(request, responder)
        except KvrouterError as error:
            await self._refuse(error, request, responder)
            return
        await handler(request, responder)

    def _handler_of(self, request: Request, responder: Responder) -> Handler:
        """Return the handler of a request. Raises UnknownPath, MethodNotAllowed, and the errors of the guard
        against pages of other origins.
        """
        path, method = request.head.path, request.head.method
        call = self._calls.get(path)
        if call is not None and method == "POST":
            check = self._guard.check_call if path in CLIENT_CALLS else self._guard.check
            check(request)
            return call
        pages = [] if call is not None else [*self._pages_at(path)]
        responder.more_headers = (*responder.more_headers, *page_headers(pages[0][0] if pages else None))
        methods = {"POST"} if call is not None else {each for page, _ in pages for each in page.methods}
        if not methods:
            raise UnknownPath(f"nothing is at {path}")
        if method == "OPTIONS":
            return partial(self._options, methods)
        if method not in methods:
            allow = ", ".join(sorted(methods))
            raise MethodNotAllowed(f"{path} takes {allow}, not {method}", allow=allow)
        if not all(isinstance(page, PublicRoute) for page, _ in pages):
            self._guard.check(request)
        found = next((route, parameters) for route, parameters in pages if method in route.methods)
        return partial(self._answer_page, *found)

    async def _answer_page(
        self, route: Route, parameters: Mapping[str, str], request: Request, responder: Responder
    ) -> None:
        """Answer with a page, or with its error. An unexpected exception is raised after a generic answer,
        because its message may quote the prompt.
        """
        page_request = PageRequest(request, parameters)
        try:
            page = await route.endpoint(page_request)
        except KvrouterError as error:
            page = self._failed_page(error, route)
        except Exception:
            failure = KvrouterError("the server failed to answer this request")
            page = self._failed_page(failure, route)
            await responder.send(page.status, page.headers, page.body)
            raise
        await responder.send(page.status, page.headers, page.body)

    def _failed_page(self, error: KvrouterError, route: Route) -> Page:
        if isinstance(route, AdminRoute):
            self.instrumentation.admin_failed(route.path, error)
        else:
            self.instrumentation.failed(error)
        return Page(error_body(error), error.status_hint, error_headers(error))

    async def _options(self, methods: set[str], request: Request, responder: Responder) -> None:
        """Answer OPTIONS: the methods of a path, and the headers of a CORS preflight."""
        allow = ", ".join(sorted({"OPTIONS", *methods})).encode()
        preflight = () if self._cors is None else self._cors.preflight(request)
        await responder.send(204, ((b"allow", allow), *preflight))

    async def _refuse(self, error: KvrouterError, request: Request, responder: Responder) -> None:
        """Answer a request that no handler answers."""
        self.instrumentation.failed(error)
        request_id = self._ended(
            request.path,
            request.headers,
            request.header("x-request-id"),
            duration_s=time.monotonic() - request.began_s,
            status=error.status_hint,
            code=error.code,
        )
        body = failure_body(error, is_anthropic=_is_anthropic(request.path))
        await responder.send(error.status_hint, (*error_headers(error), request_id), body)


def _is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's routes, or below one."""
    return path in _ANTHROPIC_ROUTES or path.startswith(tuple(f"{route}/" for route in _ANTHROPIC_ROUTES))


class FrontendApp(HttpApp):
    """The HTTP app of a frontend: generation routes, pages and admin routes.

    Gauges of the fleet are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
        expected: ExpectedEngines = no_expected_engines,
        settle_s: float = SETTLE_S,
        tracing: "RequestTracing | None" = None,
    ) -> None:
        instrumentation = FrontendInstrumentation(telemetry)
        preparer = RequestPreparer(service, texts, instrumentation, settings)
        bodies = Bodies(service, texts.texts, instrumentation, settings)
        generate = GenerateRoutes(
            service, preparer, bodies, instrumentation, tracing, keep_alive_s=settings.sse_keep_alive_s
        )
        admin = AdminRoutes(
            service,
            preparer,
            bodies,
            instrumentation,
            settings=settings,
            expected=expected,
            stats=instrumentation.stats,
        )
        super().__init__(
            {
                **generate.handlers(),
            },
            [
                *Pages(service, preparer, telemetry, expected, settle_s=settle_s).routes(),
                *admin.routes(),
                *WebPage().routes(),
            ],
            bodies=bodies,
            settings=settings,
            instrumentation=instrumentation,
            traffic=service.requests.traffic,
        )
        gauges = (Gauges(telemetry, service).refresh, preparer.refresh_gauges)
        self._ends = [telemetry.before_scrape(refresh) for refresh in gauges]

    def close(self) -> None:
        """Stop refreshing gauges and reading bodies."""
        for end in self._ends:
            end()
        self._bodies.close()
        self._compressed.close()
