"""A worker as a process: signals, health pages, drain, and its exit when another start replaced it."""

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from enum import StrEnum
from typing import Protocol

import msgspec
import uvloop
from aiohttp import web

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.api.health_schema import WorkerStatus
from kvrouter.app.attach.running_engine import RunningEngine
from kvrouter.app.lifetime import (
    LOST_PLACE,
    StopRequested,
    allow_many_files,
    settle_memory,
    stop_on_signals,
    unless_stopping,
)
from kvrouter.app.telemetry_hooks import refusals_on
from kvrouter.app.tls import address_warnings
from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import in_container
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.setting import installed_version
from kvrouter.settings.static_endpoint import STATIC_INCARNATION, static_text
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.listener import ListenerLimits, TcpServer
from kvrouter.transports.records.card_tracker import lost_why
from kvrouter.transports.records.port import Gone, GoneSink
from kvrouter.transports.requests.http.connections import HttpConnections, last_answer, service_unavailable
from kvrouter.worker import Worker

CUT_OFF_S = 0.05
"""How long idle connections are waited for at the end."""


class WorkerHealth(StrEnum):
    """How far a worker is, or a process of many. It takes requests while it is ok."""

    STARTING = "starting"
    OK = "ok"
    ENGINE_SILENT = "engine_silent"
    DRAINING = "draining"


def health_of(card: WorkerCard | None) -> WorkerHealth:
    """Return how the worker of ``card`` is; None before it is announced."""
    if card is None:
        return WorkerHealth.STARTING
    if card.draining:
        return WorkerHealth.DRAINING
    return WorkerHealth.ENGINE_SILENT if card.engine_silent else WorkerHealth.OK


@asynccontextmanager
async def health_pages(
    planes: PlaneSettings,
    health: Callable[[], WorkerHealth],
    expected: Callable[[], Sequence[ExpectedEngine]] = tuple,
) -> AsyncIterator[None]:
    """Answer ``GET /health`` with 200, whatever ``health`` returns, and ``GET /accepting`` with 503 unless it
    is ok; without a port in the settings, on none. Both name the ``expected`` engines that have a problem.

    Raises ConfigError if the port is not available.
    """
    if planes.health_port is None:
        yield
        return

    async def answer(request: web.BaseRequest) -> web.Response:
        found = health()
        if request.method not in ("GET", "HEAD") or request.path not in ("/health", "/accepting"):
            return last_answer(web.Response(status=404))
        is_well = found is WorkerHealth.OK or request.path == "/health"
        problems = [engine for engine in expected() if engine.has_problem]
        status = msgspec.to_builtins(WorkerStatus(found.value, problems or ()))
        return last_answer(web.json_response(status, status=200 if is_well else 503))

    # Clients are not authenticated here: so many connections at once, and each for one answer.
    on_refused = refusals_on("health")
    limits = ListenerLimits(connections_max=0, unauthenticated_max=planes.hello_connections_max)
    connections = HttpConnections(
        answer, limits=limits, on_dropped=on_refused, clock=AwakeClock(planes.hello_within_s)
    )
    server = TcpServer(
        connections,
        answer=lambda: service_unavailable("application/json", b'{"status":"unknown"}'),
        on_refused=on_refused,
        limits=limits,
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


logger = logging.getLogger("kvrouter.worker")


class Running(Protocol):
    """A worker that serves."""

    @property
    def worker(self) -> Worker | None:
        """The current worker; None between two workers."""

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs, and wait up to ``limit_s`` seconds for running ones."""


Run = Callable[[GoneSink], AbstractAsyncContextManager[Running]]
"""Runs a worker: inside, it serves; the sink is called when another has its place."""


class WorkerProcess:
    """One worker's life as a process, and its log."""

    def __init__(self, settings: Settings, worker_id: WorkerId, *, role: str, drain_limit_s: float) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._role = role
        self._drain_limit_s = drain_limit_s
        self._running: Running | None = None
        self.engine: RunningEngine | None = None
        """The engine that runs already, from before it is asked; None of another worker."""

    def serve(self, run: Run) -> int:
        """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

        Returns the exit code, LOST_PLACE when another has the place.
        """
        allow_many_files()
        return uvloop.run(self._serve(run))

    async def _serve(self, run: Run) -> int:
        worker_id = str(self._worker_id)
        log_event(logger, Event.START, version=installed_version(), worker=worker_id, role=self._role)
        for warning in address_warnings(self._settings, in_container=in_container(os.environ)):
            log_event(logger, Event.CONFIG_WARNING, worker=worker_id, detail=warning)
        code = 0
        async with AsyncExitStack() as stack:
            stopping = stack.enter_context(stop_on_signals())
            await stack.enter_async_context(health_pages(self._settings.planes, self._health, self._expected))

            def on_lost(_: WorkerId, __: Epoch, lost: Gone) -> None:
                nonlocal code
                code = LOST_PLACE
                reason = f"{lost_why(lost)}: ending"
                log_event(logger, Event.WORKER_REPLACED, worker=worker_id, reason=reason)
                stopping.set()

            try:
                async with unless_stopping(stopping):
                    running = await stack.enter_async_context(run(on_lost))
            except StopRequested:
                log_event(logger, Event.STOP, worker=worker_id)
                return code
            self._running = running
            settle_memory()
            if running.worker is not None:
                card = running.worker.card
                address = static_text(card) if card.incarnation == STATIC_INCARNATION else card.address
                log_event(logger, Event.READY, worker=worker_id, address=address)
            await stopping.wait()
            legs = 0 if running.worker is None else running.worker.running_legs
            log_event(logger, Event.DRAIN, worker=worker_id, running_requests=legs)
            await running.drain(self._drain_limit_s)
        log_event(logger, Event.STOP, worker=worker_id)
        return code

    def _expected(self) -> Sequence[ExpectedEngine]:
        return () if self.engine is None else (self.engine.attachment.expected,)

    def _health(self) -> WorkerHealth:
        worker = None if self._running is None else self._running.worker
        return health_of(None if worker is None else worker.card)
