"""A worker as a process: it serves until it is told to stop, or until another has its place."""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

import uvloop

from kvrouter.assembly.health import Health, health_of, health_pages
from kvrouter.assembly.lifetime import (
    LOST_PLACE,
    ToldToStop,
    allow_many_files,
    settle_memory,
    told_to_stop,
    unless_told,
)
from kvrouter.assembly.tls import doubts
from kvrouter.config import Settings
from kvrouter.config.static_endpoint import STATIC_INCARNATION, static_text
from kvrouter.config.version import installed_version
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.discovery.leases import lost_why
from kvrouter.planes.discovery.port import Gone, GoneSink
from kvrouter.telemetry import Event, log_event
from kvrouter.worker import Worker

logger = logging.getLogger("kvrouter.worker")


class Running(Protocol):
    """A worker that serves."""

    @property
    def worker(self) -> Worker:
        """It."""

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs, and wait up to ``limit_s`` seconds for what is under way."""


Run = Callable[[GoneSink], AbstractAsyncContextManager[Running]]
"""Runs a worker: inside, it serves; the sink hears when another has its place."""


class WorkerProcess:
    """One worker's life as a process, and what its log tells of it."""

    def __init__(self, settings: Settings, worker_id: WorkerId, *, role: str, drain_limit_s: float) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._role = role
        self._drain_limit_s = drain_limit_s
        self._worker: Worker | None = None

    def serve(self, run: Run) -> int:
        """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

        Returns the exit code, LOST_PLACE when another has the place.
        """
        allow_many_files()
        return uvloop.run(self._serve(run))

    async def _serve(self, run: Run) -> int:
        worker_id = str(self._worker_id)
        log_event(logger, Event.START, version=installed_version(), worker=worker_id, role=self._role)
        for doubt in doubts(self._settings):
            log_event(logger, Event.CONFIG_WARNING, worker=worker_id, detail=doubt)
        code = 0
        async with AsyncExitStack() as stack:
            stopping = stack.enter_context(told_to_stop())
            await stack.enter_async_context(health_pages(self._settings.planes, self._health))

            def on_lost(_: WorkerId, __: Epoch, lost: Gone) -> None:
                nonlocal code
                code = LOST_PLACE
                reason = f"{lost_why(lost)}: ending"
                log_event(logger, Event.WORKER_REPLACED, worker=worker_id, reason=reason)
                stopping.set()

            try:
                async with unless_told(stopping):
                    running = await stack.enter_async_context(run(on_lost))
            except ToldToStop:
                log_event(logger, Event.STOP, worker=worker_id)
                return code
            self._worker = running.worker
            card = running.worker.card
            settle_memory()
            address = static_text(card) if card.incarnation == STATIC_INCARNATION else card.address
            log_event(logger, Event.READY, worker=worker_id, address=address)
            await stopping.wait()
            log_event(logger, Event.DRAIN, worker=worker_id, running_requests=running.worker.running_legs)
            await running.drain(self._drain_limit_s)
            log_event(logger, Event.STOP, worker=worker_id)
        return code

    def _health(self) -> Health:
        return health_of(None if self._worker is None else self._worker.card)
