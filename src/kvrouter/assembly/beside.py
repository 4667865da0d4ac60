"""A worker beside an engine that runs already: it joins once the engine answers as was said of it."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import msgspec

from kvrouter.assembly.attach_words import Attached
from kvrouter.assembly.attached import attach, tell
from kvrouter.assembly.engine_worker import EngineWorkerSpec, engine_card
from kvrouter.assembly.mock_fleet import MemoryPlanes
from kvrouter.assembly.tls import advertised
from kvrouter.config import Settings
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.workers import EventLane, EventSource, Role, WorkerCard
from kvrouter.planes.requests.memory import memory_address
from kvrouter.telemetry import Event, log_event
from kvrouter.worker import TopologyEnv, Worker, new_incarnation

_log = logging.getLogger("kvrouter.up")

TRIED_AGAIN_S = 10.0
"""How long after an engine was refused it is asked again: it may have been started anew as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidEngine:
    """What is said of an engine, and where.

    ``at`` names it, as ``workers[0].engine.url``. ``places`` tells where that stands which an engine may
    contradict, or may stand: by the name of the field.
    """

    at: str
    spec: EngineWorkerSpec
    places: Mapping[str, str]
    dp_size: int | None = None
    contract: TopologyEnv | None = None

    @property
    def worker_id(self) -> WorkerId:
        """The id of its worker."""
        return self.spec.worker_id

    def mistake(self, must: str, *, field: str | None) -> ConfigError:
        """An error that names the engine, and what it contradicts; ``field`` is None or "url" for itself."""
        place = self.places.get(field or "")
        named = "" if place is None else f"{place}: "
        return ConfigError(f"{self.at}: {self.spec.at.url}: {named}{must}", param=self.at)


class EngineWorkers:
    """What the workers of this process stand on, and what their engines said of themselves.

    ``folders`` has the models whose tokenizers are known here, whatever an engine says of its own.
    """

    def __init__(
        self, settings: Settings, planes: MemoryPlanes, *, folders: Collection[ModelName] = ()
    ) -> None:
        self._settings = settings
        self._planes = planes
        self._folders = folders
        self._cards: dict[WorkerId, tuple[WorkerCard, SaidEngine]] = {}

    async def start(self, said: SaidEngine, attached: Attached, *, draining: bool) -> Worker:
        """Start the worker beside an engine that answered.

        Raises ConfigError where the engine contradicts what was said of it, or others of its model.
        """
        card = self._card_of(said, attached)
        self._check(said, card, attached)
        self._cards[said.worker_id] = card, said
        try:
            tell(_log, said.worker_id, said.spec.at, attached)
            worker = Worker(
                attached.engine,
                msgspec.structs.replace(card, draining=draining),
                discovery=self._planes.discovery,
                events=self._planes.events,
                requests=self._planes.requests,
                recovery=self._planes.events,
                topology=said.contract,
            )
            await worker.start()
        except BaseException:
            self.forget(said)
            raise
        return worker

    def forget(self, said: SaidEngine) -> None:
        """The engine has no worker any more; idempotent."""
        self._cards.pop(said.worker_id, None)

    async def asked_again(self, said: SaidEngine) -> WorkerCard:
        """Ask an engine once what it is now. Raises ConfigError."""
        attached = await attach(replace(said.spec.at, wait_s=0.0), said.worker_id)
        await attached.engine.stop()
        return self._card_of(said, attached)

    def _card_of(self, said: SaidEngine, attached: Attached) -> WorkerCard:
        incarnation = new_incarnation()
        return engine_card(
            said.spec,
            attached,
            incarnation=incarnation,
            address=memory_address(said.worker_id, incarnation),
            namespace=self._settings.planes.namespace,
            event_source=EventSource(EventLane.MEMORY),
            here=advertised(self._settings),
        )

    def _check(self, said: SaidEngine, card: WorkerCard, attached: Attached) -> None:
        if said.dp_size not in (None, card.dp_size):
            raise said.mistake(
                f"the engine has {card.dp_size} data-parallel ranks, not {said.dp_size}: leave it out",
                field="dp_size",
            )
        if card.tokenizer is None and card.model not in self._folders:
            raise said.mistake(
                f"is required: the engine's own is {attached.tokenizer!r}, which is no folder here",
                field="tokenizer",
            )
        for other, its in self._cards.values():
            if other.model != card.model or other.worker_id == card.worker_id:
                continue
            if Role.PREFILL in (other.role, card.role) and its.spec.at.kind is not said.spec.at.kind:
                raise said.mistake(
                    f"must be {its.spec.at.kind.value!r}, as that of {its.at}: KV goes between engines of "
                    "one kind",
                    field="kind",
                )
            if other.block_size != card.block_size:
                raise said.mistake(
                    f"the engine's blocks have {card.block_size} tokens, and those of {its.at} have "
                    f"{other.block_size}: engines of one model have blocks of one size",
                    field="block_size",
                )
            if other.context_length != card.context_length:
                raise said.mistake(
                    f"the engine's context holds {card.context_length} tokens, and that of {its.at} "
                    f"{other.context_length}: say the smaller one, for both",
                    field="context_length",
                )


Heard = Callable[[], None]
"""Is told that the engine answered for the first time, or did not."""

Refused = Callable[[KvrouterError], None]
"""Hears why the engine has no worker; again at each try."""

Joined = Callable[[Worker], None]
"""Hears of each worker that the engine gets."""


def _nobody(*_: object) -> None:
    """What happens here concerns nobody else."""


class BesideEngine:
    """One engine, from its first answer on: :meth:`run`, then :meth:`leave`."""

    def __init__(
        self,
        said: SaidEngine,
        workers: EngineWorkers,
        *,
        on_refused: Refused,
        on_heard: Heard = _nobody,
        on_joined: Joined = _nobody,
    ) -> None:
        self.said = said
        self.worker: Worker | None = None
        self.awaited = "does not answer"
        """Why it has no worker yet."""

        self._workers = workers
        self._on_refused = on_refused
        self._on_heard = on_heard
        self._on_joined = on_joined
        self._rests = False

    async def run(self) -> None:
        """Let the engine's worker join as soon as the engine answers as was said, and join anew when the
        engine was started as another one, with other ranks or a longer context; until cancelled.
        """
        while True:
            try:
                worker = self.worker = await self._joined()
                self._on_joined(worker)
                self._on_heard()
                await self._until_another(worker)
                self.awaited = "was started anew"
                await self.leave()
                continue
            except KvrouterError as error:
                self._refused(error)
            except Exception as error:  # noqa: BLE001 - a mistake of ours is shown, and holds nobody up
                log_event(_log, Event.INTERNAL_ERROR, worker=str(self.said.worker_id), exc_info=error)
                self._refused(self.said.mistake("a mistake of ours", field=None))
            self._on_heard()
            await asyncio.sleep(TRIED_AGAIN_S)

    async def rest(self, rests: bool) -> None:
        """Take no new requests while the engine ``rests``; running ones go on."""
        self._rests = rests
        if self.worker is not None and self.worker.card.draining != rests:
            await (self.worker.begin_drain() if rests else self.worker.end_drain())

    async def move(self, said: SaidEngine) -> None:
        """The engine is elsewhere than was said, and else the same one."""
        self.said = said
        if self.worker is not None:
            config, place = self.worker.card.runtime_config, said.spec.runtime_config
            await self.worker.publish_runtime_config(
                msgspec.structs.replace(
                    config, topology_domains=place.topology_domains, topology_levels=place.topology_levels
                )
            )

    async def leave(self, *, drain_limit_s: float = 0.0) -> None:
        """Let running requests finish for so long, and be gone; idempotent."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        try:
            if drain_limit_s:
                await worker.drain(drain_limit_s)
        finally:
            await worker.stop()
            self._workers.forget(self.said)

    async def _joined(self) -> Worker:
        at = replace(self.said.spec.at, wait_s=math.inf)
        try:
            attached = await attach(at, self.said.worker_id, on_awaited=lambda _: self._on_heard())
        except KvrouterError as error:
            must = error.message.removeprefix(_flag(error))
            raise self.said.mistake(must, field=error.param) from error
        try:
            return await self._workers.start(self.said, attached, draining=self._rests)
        except BaseException:
            await attached.engine.stop()
            raise

    async def _until_another(self, worker: Worker) -> None:
        """Wait until an engine that was set aside answers as another one than its worker's card describes."""
        while True:
            await asyncio.sleep(TRIED_AGAIN_S)
            if worker.card.engine_silent:
                try:
                    card = await self._workers.asked_again(self.said)
                except KvrouterError:
                    continue  # the worker tells that, and why
                if _told(card) != _told(worker.card):
                    return

    def _refused(self, error: KvrouterError) -> None:
        self.awaited = "was refused: the log says why"
        self._on_refused(error)


def _told(card: WorkerCard) -> tuple[object, ...]:
    """What an engine cannot change without a new worker."""
    return card.model, card.block_size, card.context_length, card.dp_start, card.dp_size


def _flag(error: KvrouterError) -> str:
    """How an error begins that is about a flag of the command for one engine."""
    return f"--{(error.param or '').replace('_', '-')}: "
