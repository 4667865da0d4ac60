"""A fleet file's engines that run already: asked, held against the file, and each given a worker here."""

import asyncio
import logging
import math
from typing import Self

from kvrouter.assembly.attach_words import Attached
from kvrouter.assembly.attached import attach, tell
from kvrouter.assembly.described import contract_of
from kvrouter.assembly.described_engines import EngineLine, engine_lines, worker_spec
from kvrouter.assembly.engine_worker import EngineWorkerSpec, engine_card
from kvrouter.assembly.mock_fleet import MemoryPlanes
from kvrouter.assembly.tls import advertised
from kvrouter.config import FleetFile, Settings
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import EventLane, EventSource, WorkerCard
from kvrouter.planes.requests.memory import memory_address
from kvrouter.telemetry import Event, log_event
from kvrouter.worker import Worker, new_incarnation

_log = logging.getLogger("kvrouter.up")

TRIED_AGAIN_S = 10.0
"""How long after an engine was refused it is asked again: it may have been started anew as it should be."""


class AttachedFleet:
    """The workers beside all engines of a fleet file that run already.

    Use it as an async context manager. Inside, every engine that answered when it was first asked has its
    worker; the others get theirs once they answer, and hold nobody up. Entering raises ConfigError, with a
    line for each of them, for engines that contradict the file; one that answers late and contradicts it is
    told in the log, and asked again.
    """

    def __init__(
        self, fleet: FleetFile, settings: Settings, planes: MemoryPlanes, *, engine_key: str | None
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._planes = planes
        self._engine_key = engine_key
        self._lines = tuple(engine_lines(fleet))
        self._contracts = {line.group.name: contract_of(line.group) for line in self._lines}
        self._awaited = {line.worker_id: "does not answer" for line in self._lines}
        self._refusals: dict[WorkerId, str] = {}
        self._unheard = {line.worker_id for line in self._lines}
        self._all_heard = asyncio.Event()
        self._cards: dict[WorkerId, tuple[WorkerCard, EngineLine]] = {}
        """What the engines that have a worker, or get one now, said of themselves."""

        self._mistakes: list[KvrouterError] | None = []
        """What is wrong with the start; None once it is over."""

        self._tasks: list[asyncio.Task[None]] = []
        self.workers: dict[WorkerId, Worker] = {}

    def awaited(self) -> list[str]:
        """The engines that have no worker yet: a line for each, without addresses, as clients may see it."""
        return [
            f"the engine of {line.at} (group {line.group.name!r}) {self._awaited[line.worker_id]}"
            for line in self._lines
            if line.worker_id in self._awaited
        ]

    async def __aenter__(self) -> Self:
        try:
            self._tasks = [asyncio.create_task(self._bring_in(line)) for line in self._lines]
            if self._lines:
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
        for worker in self.workers.values():
            await worker.stop()

    async def _bring_in(self, line: EngineLine) -> None:
        """Let the engine's worker join as soon as the engine answers as the file says, and join anew when the
        engine was started as another one, with other ranks or a longer context.
        """
        while True:
            try:
                worker = self.workers[line.worker_id] = await self._joined(line)
                del self._awaited[line.worker_id]
                self._heard(line)
                await self._until_another(line, worker)
                self._awaited[line.worker_id] = "was started anew"
                await worker.stop()
                del self.workers[line.worker_id], self._cards[line.worker_id]
                continue
            except KvrouterError as error:
                self._refused(line, error)
            except Exception as error:  # noqa: BLE001 - a mistake of ours is shown, and holds nobody up
                log_event(_log, Event.INTERNAL_ERROR, worker=str(line.worker_id), exc_info=error)
                self._refused(line, ConfigError(f"{line.at}: {line.url}: a mistake of ours", param=line.at))
            self._heard(line)
            await asyncio.sleep(TRIED_AGAIN_S)

    async def _until_another(self, line: EngineLine, worker: Worker) -> None:
        """Wait until an engine that was set aside answers as another one than its worker's card describes."""
        while True:
            await asyncio.sleep(TRIED_AGAIN_S)
            if worker.card.engine_silent:
                try:
                    card = await self._asked_again(line)
                except KvrouterError:
                    continue  # the worker tells that, and why
                if _said(card) != _said(worker.card):
                    return

    async def _asked_again(self, line: EngineLine) -> WorkerCard:
        spec = worker_spec(self._fleet, line, engine_key=self._engine_key, wait_s=0.0)
        attached = await attach(spec.at, line.worker_id)
        await attached.engine.stop()
        return self._card_of(line, spec, attached)

    async def _joined(self, line: EngineLine) -> Worker:
        spec = worker_spec(self._fleet, line, engine_key=self._engine_key, wait_s=math.inf)
        try:
            attached = await attach(spec.at, line.worker_id, on_awaited=lambda _: self._heard(line))
        except KvrouterError as error:
            raise self._mistake(line, error.message.removeprefix(_flag(error)), field=error.param) from error
        try:
            worker = self._make_worker(line, spec, attached)
            await worker.start()
        except BaseException:
            self._cards.pop(line.worker_id, None)
            await attached.engine.stop()
            raise
        return worker

    def _make_worker(self, line: EngineLine, spec: EngineWorkerSpec, attached: Attached) -> Worker:
        card = self._card_of(line, spec, attached)
        self._check(line, card, attached)
        self._cards[line.worker_id] = card, line
        tell(_log, line.worker_id, spec.at, attached)
        return Worker(
            attached.engine,
            card,
            discovery=self._planes.discovery,
            events=self._planes.events,
            requests=self._planes.requests,
            recovery=self._planes.events,
            topology=self._contracts[line.group.name],
        )

    def _card_of(self, line: EngineLine, spec: EngineWorkerSpec, attached: Attached) -> WorkerCard:
        incarnation = new_incarnation()
        return engine_card(
            spec,
            attached,
            incarnation=incarnation,
            address=memory_address(line.worker_id, incarnation),
            namespace=self._settings.planes.namespace,
            event_source=EventSource(EventLane.MEMORY),
            here=advertised(self._settings),
        )

    def _check(self, line: EngineLine, card: WorkerCard, attached: Attached) -> None:
        """Hold what the engine says against the file, and against what others of its model said."""
        if line.group.dp_size not in (None, card.dp_size):
            raise self._mistake(
                line,
                f"the engine has {card.dp_size} data-parallel ranks, not {line.group.dp_size}: leave it out",
                field="dp_size",
            )
        if card.tokenizer is None:
            raise self._mistake(
                line,
                f"is required: the engine's own is {attached.tokenizer!r}, which is no folder here",
                field="tokenizer",
            )
        for other, its_line in self._cards.values():
            if other.model == card.model and other.block_size != card.block_size:
                raise self._mistake(
                    line,
                    f"the engine's blocks have {card.block_size} tokens, and those of {its_line.at} have "
                    f"{other.block_size}: engines of one model have blocks of one size",
                    field="block_size",
                )
            if other.model == card.model and other.context_length != card.context_length:
                raise self._mistake(
                    line,
                    f"the engine's context holds {card.context_length} tokens, and that of {its_line.at} "
                    f"{other.context_length}: say the smaller one, for both",
                    field="context_length",
                )

    def _mistake(self, line: EngineLine, must: str, *, field: str | None) -> ConfigError:
        """An error that names the engine's line, and what of the file it contradicts."""
        return ConfigError(f"{line.at}: {line.url}: {self._named(line, field)}{must}", param=line.at)

    def _named(self, line: EngineLine, field: str | None) -> str:
        """Where the file says, or may say, what was contradicted; "" for what is about the URL itself."""
        model = f"models[{self._fleet.models.index(self._fleet.model_of(line.group))}]"
        group = f"workers[{self._fleet.workers.index(line.group)}]"
        places = {
            "model": f"{model}.name: ",
            "tokenizer": f"{model}.tokenizer: ",
            "block_size": f"{model}.block_size: ",
            "context_length": f"{model}.context_length: ",
            "role": f"{group}.role: ",
            "dp_size": f"{group}.dp_size: ",
            "kv_events": f"{group}.engine.kv_events_endpoint: ",
            "kv_events_replay": f"{group}.engine.kv_events_replay_endpoint: ",
        }
        return places.get(field or "", "")

    def _refused(self, line: EngineLine, error: KvrouterError) -> None:
        self._awaited[line.worker_id] = "was refused: the log says why"
        if self._mistakes is not None:
            self._mistakes.append(error)
        elif self._refusals.get(line.worker_id) != error.message:
            self._refusals[line.worker_id] = error.message
            model = self._fleet.model_of(line.group).name
            log_event(
                _log, Event.WORKER_REFUSED, worker=str(line.worker_id), model=model, reason=error.message
            )

    def _heard(self, line: EngineLine) -> None:
        """The engine's first answer came, or it gave none."""
        self._unheard.discard(line.worker_id)
        if not self._unheard:
            self._all_heard.set()


def _said(card: WorkerCard) -> tuple[object, ...]:
    """What an engine cannot change without a new worker."""
    return card.model, card.block_size, card.context_length, card.dp_start, card.dp_size


def _flag(error: KvrouterError) -> str:
    """How an error begins that is about a flag of the command for one engine."""
    return f"--{(error.param or '').replace('_', '-')}: "


def _as_one(mistakes: list[KvrouterError]) -> KvrouterError:
    if len(mistakes) == 1:
        return mistakes[0]
    return ConfigError("\n".join(error.message for error in mistakes), param=mistakes[0].param)
