"""What a process of workers tells whatever looks after it: that it answers, and whether it takes requests."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum

from aiohttp import web

from kvrouter.assembly.told import refusals_on
from kvrouter.config.planes import PlaneSettings
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.listener import TcpServer
from kvrouter.planes.requests.awake import AwakeClock
from kvrouter.planes.requests.http.connections import HttpConnections, last_answer, service_unavailable

CUT_OFF_S = 0.05
"""How long idle connections are waited for at the end."""


class Health(StrEnum):
    """How far a worker is, or a process of many. It takes requests while it is ok."""

    STARTING = "starting"
    OK = "ok"
    ENGINE_SILENT = "engine_silent"
    DRAINING = "draining"


def health_of(card: WorkerCard | None) -> Health:
    """Return how the worker of ``card`` is; None before it is announced."""
    if card is None:
        return Health.STARTING
    if card.draining:
        return Health.DRAINING
    return Health.ENGINE_SILENT if card.engine_silent else Health.OK


@asynccontextmanager
async def health_pages(planes: PlaneSettings, health: Callable[[], Health]) -> AsyncIterator[None]:
    """Answer ``GET /health`` with 200, whatever ``health`` says, and ``GET /accepting`` with 503 unless it is
    ok; on no port where the settings name none.

    Raises ConfigError for a port that cannot be had.
    """
    if planes.health_port is None:
        yield
        return

    async def answer(request: web.BaseRequest) -> web.Response:
        found = health()
        if request.method not in ("GET", "HEAD") or request.path not in ("/health", "/accepting"):
            return last_answer(web.Response(status=404))
        is_well = found is Health.OK or request.path == "/health"
        return last_answer(web.json_response({"status": found.value}, status=200 if is_well else 503))

    # Whoever asks is a stranger here: so many connections at once, and each for one answer.
    on_refused = refusals_on("health")
    connections = HttpConnections(
        answer,
        connections_max=0,
        unauthenticated_max=planes.hello_connections_max,
        on_dropped=on_refused,
        clock=AwakeClock(planes.hello_within_s),
    )
    server = TcpServer(
        connections,
        answer=lambda: service_unavailable("application/json", b'{"status":"unknown"}'),
        on_refused=on_refused,
    )
    try:
        try:
            await server.start(planes.listen_host, planes.health_port)
        except OSError as error:
            raise ConfigError(
                f"--health-port: {planes.listen_host}:{planes.health_port} cannot be had: {error.strerror}",
                param="health_port",
            ) from error
        yield
    finally:
        server.close()
        await server.wait_closed()
        await connections.shutdown(CUT_OFF_S)
