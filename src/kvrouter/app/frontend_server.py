"""The HTTP frontend of a router: starts it on bound sockets, and drains it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from socket import socket
from typing import TYPE_CHECKING

from kvrouter.api.fleet_schema import ExpectedState
from kvrouter.app.lifetime import descriptors_for, explained
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.frontend.fleet_state import ExpectedEngines, no_expected_engines
from kvrouter.frontend.http import HttpServer
from kvrouter.frontend.http_app import FrontendApp, HttpApp
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import FrontendSettings
from kvrouter.telemetry import Telemetry

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestTracing

GOODBYE_S = 1.0
"""How long the last answers may take to reach their clients after all requests have ended."""


@dataclass(frozen=True, slots=True)
class ServingApp:
    """A router with its running HTTP server."""

    service: RouterService
    server: HttpServer
    telemetry: Telemetry

    @property
    def address(self) -> tuple[str, int]:
        """The address where the frontend listens."""
        return self.server.addresses[0]

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and let running ones finish; return how many were cut off at the limit.

        The server accepts connections until then: a new client gets the error that the router is shutting
        down, and a request that is cut off gets an error, not silence.
        """
        cut = await self.service.requests.drain(limit_s)
        await self.server.drain(GOODBYE_S)
        return cut


@asynccontextmanager
async def open_frontend(
    service: RouterService,
    texts: ModelTexts,
    *,
    settings: FrontendSettings,
    telemetry: Telemetry,
    sockets: list[socket],
    expected: ExpectedEngines = no_expected_engines,
    tracing: "RequestTracing | None" = None,
) -> AsyncIterator[ServingApp]:
    """Start the router and serve it on ``sockets``, which are bound already. ``expected`` returns the engines
    that this process is to attach; ``tracing`` begins the spans of requests. Raises CannotListen.
    """
    app = FrontendApp(
        service,
        texts,
        settings=settings,
        telemetry=telemetry,
        expected=expected,
        tracing=tracing,
    )

    def count_awaited() -> None:
        missing = sum(engine.state != ExpectedState.JOINED for engine in expected())
        telemetry.engines_awaited.set(missing)

    end = telemetry.before_scrape(count_awaited)
    try:
        async with serving(service, app, settings=settings, sockets=sockets) as server:
            yield ServingApp(service, server, telemetry)
    finally:
        end()
        app.close()


@asynccontextmanager
async def serving(
    service: RouterService, app: HttpApp, *, settings: FrontendSettings, sockets: list[socket]
) -> AsyncIterator[HttpServer]:
    """Start the router and serve it through this HTTP app. Raises CannotListen."""
    limits = descriptors_for(settings.connections_max)
    server = app.server(
        connections_max=limits.connections_max,
        descriptors_max=limits.numbers_max,
        refused_max=limits.refused_max,
    )
    end = app.instrumentation.watch(server)
    try:
        await service.start()
        with explained(settings.http_host, settings.http_port):
            await server.serve(sockets=sockets)
        yield server
    finally:
        await server.drain(0.0)
        service.stop()
        end()
