"""What a process of workers tells whatever looks after it: that it answers, and whether it takes requests."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum

from aiohttp import web

from kvrouter.config.planes import PlaneSettings
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import WorkerCard


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

    async def answers(_: web.Request) -> web.Response:
        return web.json_response({"status": health().value})

    async def accepts(_: web.Request) -> web.Response:
        found = health()
        return web.json_response({"status": found.value}, status=200 if found is Health.OK else 503)

    app = web.Application()
    app.router.add_get("/health", answers)
    app.router.add_get("/accepting", accepts)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, planes.listen_host, planes.health_port).start()
        except OSError as error:
            raise ConfigError(
                f"--health-port: {planes.listen_host}:{planes.health_port} cannot be had: {error.strerror}",
                param="health_port",
            ) from error
        yield
    finally:
        await runner.cleanup()
