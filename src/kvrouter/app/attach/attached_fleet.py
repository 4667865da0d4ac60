"""Attaches a fleet file's engines: probes each, compares it with the file, and runs a worker for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Self

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.app.attach.attachment import EngineAttachment, EngineWorkers
from kvrouter.app.attach.spec import FileEngine, file_engines
from kvrouter.app.attach.transport_provider import MemoryTransports
from kvrouter.app.fleet_build import topology_env_of
from kvrouter.app.mock_fleet import ProcessTransports
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import FieldPlace, dotted
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.worker import Worker

_log = logging.getLogger("kvrouter.up")


class AttachedFleet:
    """The workers of all engines in a fleet file that already run.

    Use it as an async context manager. Inside, every engine that answered its first probe has its worker; the
    others get theirs once they answer, and delay no other. Entering raises ConfigError, with a line for each,
    for engines that contradict the file; an engine that answers later and contradicts it is logged and probed
    again.
    """

    def __init__(
        self,
        fleet: FleetFile,
        settings: Settings,
        transports: ProcessTransports,
        *,
        environ: Mapping[str, str],
        place: FieldPlace = dotted,
    ) -> None:
        self._fleet = fleet
        self._all_attempted = asyncio.Event()
        self._changed = asyncio.Event()

        self._mistakes: list[KvrouterError] | None = []
        """Errors of the first probes; None once the start is over."""

        self._tasks: list[asyncio.Task[None]] = []
        self.engine_workers = EngineWorkers(settings, MemoryTransports(transports))
        """Starts the workers, and checks their engines against each other."""
        self._engines = [
            self._attachment_of(engine._replace(spec=engine.with_key(environ)))
            for engine in file_engines(fleet, place)
        ]
        self._unattempted = {each.spec.worker_id for each in self._engines}

    @property
    def workers(self) -> dict[WorkerId, Worker]:
        """The workers that have joined."""
        return {each.spec.worker_id: each.worker for each in self._engines if each.worker is not None}

    def expected(self) -> list[ExpectedEngine]:
        """Every engine, with or without a worker."""
        return [each.expected for each in self._engines]

    async def changes(self) -> AsyncIterator[list[ExpectedEngine]]:
        """Yield every engine whenever the state of one changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self.expected()

    async def __aenter__(self) -> Self:
        try:
            self._tasks = [asyncio.create_task(each.run()) for each in self._engines]
            if self._engines:
                await self._all_attempted.wait()
            mistakes, self._mistakes = self._mistakes, None
            if mistakes:
                raise _as_one(mistakes)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = await asyncio.gather(*(each.leave() for each in self._engines), return_exceptions=True)
        for error in left:
            if isinstance(error, BaseException):
                raise error

    def _attachment_of(self, engine: FileEngine) -> EngineAttachment:
        worker_id = engine.spec.worker_id

        def on_refused(error: KvrouterError) -> None:
            self._refused(engine, error)

        def on_attempt_ended() -> None:
            self._unattempted.discard(worker_id)
            if not self._unattempted:
                self._all_attempted.set()

        return EngineAttachment(
            engine.spec,
            self.engine_workers,
            topology=topology_env_of(engine.group),
            on_refused=on_refused,
            on_attempt_ended=on_attempt_ended,
            on_state=self._changed.set,
        )

    def _refused(self, engine: FileEngine, error: KvrouterError) -> None:
        if self._mistakes is not None:
            self._mistakes.append(error)
            return
        worker, model = str(engine.spec.worker_id), self._fleet.shown_name(self._fleet.model_of(engine.group))
        log_event(_log, Event.WORKER_REFUSED, worker=worker, model=model, reason=error.message)


def _as_one(mistakes: list[KvrouterError]) -> KvrouterError:
    if len(mistakes) == 1:
        return mistakes[0]
    return ConfigError("\n".join(error.message for error in mistakes), param=mistakes[0].param)
