"""Attaches the engines of a fleet file: probes each, compares it with the file, and runs a worker for it."""

import asyncio
import logging
from typing import Self

from kvrouter.attach.attachment import EngineAttachment, EngineSpec, EngineWorkers
from kvrouter.attach.spec import EngineLine, engine_lines, worker_spec
from kvrouter.attach.transport_provider import MemoryTransports
from kvrouter.config import FleetFile, Settings
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.telemetry import Event, log_event
from kvrouter.wiring.fleet_build import contract_of
from kvrouter.wiring.mock_fleet import MemoryPlanes
from kvrouter.worker import Worker

_log = logging.getLogger("kvrouter.up")


class AttachedFleet:
    """The workers for all engines of a fleet file that run already.

    Use it as an async context manager. Inside, every engine that answered when it was first asked has its
    worker; the others get theirs once they answer, and hold nobody up. Entering raises ConfigError, with a
    line for each of them, for engines that contradict the file; one that answers late and contradicts it is
    logged, and asked again.
    """

    def __init__(
        self, fleet: FleetFile, settings: Settings, planes: MemoryPlanes, *, engine_key: str | None
    ) -> None:
        self._fleet = fleet
        self._refusals: dict[WorkerId, str] = {}
        self._all_heard = asyncio.Event()
        self._mistakes: list[KvrouterError] | None = []
        """What is wrong with the start; None once it is over."""

        self._tasks: list[asyncio.Task[None]] = []
        workers = EngineWorkers(settings, MemoryTransports(planes))
        self._engines = [
            (line, self._attachment_of(line, workers, engine_key=engine_key)) for line in engine_lines(fleet)
        ]
        self._unheard = {line.worker_id for line, _ in self._engines}

    @property
    def workers(self) -> dict[WorkerId, Worker]:
        """Those that have joined."""
        return {line.worker_id: each.worker for line, each in self._engines if each.worker is not None}

    def awaited(self) -> list[str]:
        """The engines that have no worker yet: a line for each, without addresses, as clients may see it."""
        return [
            f"the engine of {line.at} (group {line.group.name!r}) {each.awaited}"
            for line, each in self._engines
            if each.worker is None
        ]

    async def __aenter__(self) -> Self:
        try:
            self._tasks = [asyncio.create_task(each.run()) for _, each in self._engines]
            if self._engines:
                await self._all_heard.wait()
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
        for _, each in self._engines:
            await each.leave()

    def _attachment_of(
        self, line: EngineLine, workers: EngineWorkers, *, engine_key: str | None
    ) -> EngineAttachment:
        said = EngineSpec(
            at=line.at,
            spec=worker_spec(self._fleet, line, engine_key=engine_key, wait_s=0.0),
            places=self._places(line),
            dp_size=line.group.dp_size,
            contract=contract_of(line.group),
        )

        def on_refused(error: KvrouterError) -> None:
            self._refused(line, error)

        def on_heard() -> None:
            self._unheard.discard(line.worker_id)
            if not self._unheard:
                self._all_heard.set()

        return EngineAttachment(said, workers, on_refused=on_refused, on_heard=on_heard)

    def _places(self, line: EngineLine) -> dict[str, str]:
        """Where the file says, or may say, what an engine may contradict."""
        model = f"models[{self._fleet.models.index(self._fleet.model_of(line.group))}]"
        group = f"workers[{self._fleet.workers.index(line.group)}]"
        return {
            "model": f"{model}.name",
            "tokenizer": f"{model}.tokenizer",
            "block_size": f"{model}.block_size",
            "context_length": f"{model}.context_length",
            "role": f"{group}.role",
            "dp_size": f"{group}.dp_size",
            "kind": f"{group}.engine.kind",
            "kv_events": f"{group}.engine.kv_events_endpoint",
            "kv_events_replay": f"{group}.engine.kv_events_replay_endpoint",
        }

    def _refused(self, line: EngineLine, error: KvrouterError) -> None:
        if self._mistakes is not None:
            self._mistakes.append(error)
        elif self._refusals.get(line.worker_id) != error.message:
            self._refusals[line.worker_id] = error.message
            model = self._fleet.model_of(line.group).name
            log_event(
                _log, Event.WORKER_REFUSED, worker=str(line.worker_id), model=model, reason=error.message
            )


def _as_one(mistakes: list[KvrouterError]) -> KvrouterError:
    if len(mistakes) == 1:
        return mistakes[0]
    return ConfigError("\n".join(error.message for error in mistakes), param=mistakes[0].param)
