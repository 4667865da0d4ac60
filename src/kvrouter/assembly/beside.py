"""A worker beside an engine that runs already: it joins once the engine answers as was said of it."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec

from kvrouter.assembly.attach_words import Attached
from kvrouter.assembly.attached import attach, tell
from kvrouter.assembly.engine_worker import EngineWorkerSpec, engine_card, tokenizer_of
from kvrouter.assembly.ground import Ground
from kvrouter.assembly.tls import advertised
from kvrouter.config import Settings
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.workers import Role
from kvrouter.telemetry import Event, log_event
from kvrouter.text.source import tokenizer_folder
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


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker that serves; ``lost`` is set when another has its place.

    ``said`` is what it was made of; closing ``wires`` stops it first.
    """

    worker: Worker
    said: SaidEngine
    attached: Attached
    lost: asyncio.Event
    wires: AsyncExitStack


class EngineWorkers:
    """The workers of this process: where they stand, and what their engines said of themselves.

    ``folders`` has the models whose tokenizers are known here, whatever an engine says of its own; None where
    only front doors elsewhere need them.
    """

    def __init__(
        self, settings: Settings, ground: Ground, *, folders: Collection[ModelName] | None = ()
    ) -> None:
        self._settings = settings
        self._ground = ground
        self._folders = folders
        self._engines: dict[WorkerId, tuple[Attached, SaidEngine]] = {}

    async def start(self, said: SaidEngine, attached: Attached, *, rests: Callable[[], bool]) -> Standing:
        """Start the worker beside an engine that answered.

        Raises ConfigError where the engine contradicts what was said of it, or others of its model.
        """
        await self._check(said, attached)
        self._engines[said.worker_id] = attached, said
        wires = AsyncExitStack()
        try:
            tell(_log, said.worker_id, said.spec.at, attached)
            stand = await wires.enter_async_context(self._ground.stand(said.spec, attached))
            incarnation = new_incarnation()
            card = engine_card(
                said.spec,
                attached,
                incarnation=incarnation,
                address=stand.address_of(said.worker_id, incarnation),
                namespace=self._settings.planes.namespace,
                event_source=stand.source,
                here=advertised(self._settings),
            )
            worker = Worker(
                attached.engine,
                msgspec.structs.replace(card, draining=rests()),
                discovery=stand.discovery,
                events=stand.events,
                requests=stand.requests,
                recovery=stand.recovery,
                topology=said.contract,
            )
            await worker.start()
            wires.push_async_callback(worker.stop)
        except BaseException:
            await wires.aclose()
            del self._engines[said.worker_id]
            raise
        return Standing(worker, said, attached, stand.lost, wires)

    async def end(self, said: SaidEngine, standing: Standing, *, drain_limit_s: float) -> None:
        """Let running requests finish for so long, and be gone."""
        try:
            if drain_limit_s:
                await standing.worker.drain(drain_limit_s)
        finally:
            self._engines.pop(said.worker_id, None)
            await standing.wires.aclose()

    async def _check(self, said: SaidEngine, attached: Attached) -> None:
        if said.dp_size not in (None, attached.dp_size):
            raise said.mistake(
                f"the engine has {attached.dp_size} data-parallel ranks, not {said.dp_size}: leave it out",
                field="dp_size",
            )
        if self._folders is not None and attached.model not in self._folders:
            source = tokenizer_of(said.spec, attached)
            if source is None:
                raise said.mistake(
                    f"is required: the engine's own is {attached.tokenizer!r}, which is no folder here",
                    field="tokenizer",
                )
            try:
                await asyncio.to_thread(tokenizer_folder, source)
            except ConfigError as error:
                raise said.mistake(error.message, field="tokenizer") from error
        for other, its in self._engines.values():
            if other.model != attached.model or its.worker_id == said.worker_id:
                continue
            kind, its_kind = said.spec.at.kind, its.spec.at.kind
            if Role.PREFILL in (said.spec.at.role, its.spec.at.role) and kind is not its_kind:
                raise said.mistake(
                    f"must be {its_kind.value!r}, as that of {its.at}: KV goes between engines of one kind",
                    field="kind",
                )
            if other.block_size != attached.block_size:
                raise said.mistake(
                    f"the engine's blocks have {attached.block_size} tokens, and those of {its.at} have "
                    f"{other.block_size}: engines of one model have blocks of one size",
                    field="block_size",
                )
            if other.context_length != attached.context_length:
                raise said.mistake(
                    f"the engine's context holds {attached.context_length} tokens, and that of {its.at} "
                    f"{other.context_length}: say the smaller one, for both",
                    field="context_length",
                )


Heard = Callable[[], None]
"""Is told that the engine answered for the first time, or did not."""

Refused = Callable[[KvrouterError], None]
"""Hears why the engine has no worker; again at each try. What is no ConfigError is of the planes."""

Joined = Callable[[Worker], None]
"""Hears of each worker that the engine gets."""


def _nobody(*_: object) -> None:
    """What happens here concerns nobody else."""


class BesideEngine:
    """One engine, from its first answer on: :meth:`run`, then :meth:`leave`.

    ``drain_limit_s`` is for how long running requests may go on once another process has the worker's place.
    """

    def __init__(
        self,
        said: SaidEngine,
        workers: EngineWorkers,
        *,
        on_refused: Refused,
        on_heard: Heard = _nobody,
        on_joined: Joined = _nobody,
        drain_limit_s: float = 0.0,
    ) -> None:
        self.said = said
        self.awaited = "does not answer"
        """Why it has no worker yet."""

        self._workers = workers
        self._on_refused = on_refused
        self._on_heard = on_heard
        self._on_joined = on_joined
        self._drain_limit_s = drain_limit_s
        self._rests = False
        self._standing: Standing | None = None

    @property
    def worker(self) -> Worker | None:
        """Its worker, once it has one."""
        return None if self._standing is None else self._standing.worker

    async def run(self) -> None:
        """Let the engine's worker join as soon as the engine answers as was said, and join anew when the
        engine was started as another one, with other ranks or a longer context; until cancelled.
        """
        while True:
            try:
                standing = self._standing = await self._joined()
                await self._catch_up(standing)
                self._on_joined(standing.worker)
                self._on_heard()
                self.awaited = await self._until_another(standing)
                is_lost = standing.lost.is_set()
                await self.leave(drain_limit_s=self._drain_limit_s if is_lost else 0.0)
                continue
            except KvrouterError as error:
                self._refused(error)
            except Exception as error:  # noqa: BLE001 - a mistake of ours is shown, and holds nobody up
                log_event(_log, Event.INTERNAL_ERROR, worker=str(self.said.worker_id), exc_info=error)
                self._refused(self.said.mistake("a mistake of ours", field=None))
            self._on_heard()
            await self.leave()
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
        standing, self._standing = self._standing, None
        if standing is not None:
            await self._workers.end(self.said, standing, drain_limit_s=drain_limit_s)

    async def _catch_up(self, standing: Standing) -> None:
        """Do what was asked for while the worker joined: it began as it was wanted before."""
        await self.rest(self._rests)
        if self.said is not standing.said:
            await self.move(self.said)

    async def _joined(self) -> Standing:
        attached = await self._attached(math.inf)
        self.awaited = "is served by another process"
        try:
            return await self._workers.start(self.said, attached, rests=lambda: self._rests)
        except BaseException:
            await attached.engine.stop()
            raise

    async def _attached(self, wait_s: float) -> Attached:
        at = replace(self.said.spec.at, wait_s=wait_s)
        try:
            return await attach(at, self.said.worker_id, on_awaited=lambda _: self._on_heard())
        except KvrouterError as error:
            raise self.said.mistake(error.message, field=error.param) from error

    async def _until_another(self, standing: Standing) -> str:
        """Wait until an engine that was set aside answers as another one than its worker's card describes, or
        until another process has the worker's place; return which, in words.
        """
        while True:
            try:
                async with asyncio.timeout(TRIED_AGAIN_S):
                    await standing.lost.wait()
                return "is served by another process"
            except TimeoutError:
                pass
            if standing.worker.card.engine_silent:
                try:
                    attached = await self._attached(0.0)
                except KvrouterError:
                    continue  # the worker tells that, and why
                await attached.engine.stop()
                if _told(attached) != _told(standing.attached):
                    return "was started anew"

    def _refused(self, error: KvrouterError) -> None:
        is_its_own = isinstance(error, ConfigError)
        self.awaited = f"{'was refused' if is_its_own else 'cannot be announced'}: the log says why"
        self._on_refused(error)


def _told(attached: Attached) -> tuple[object, ...]:
    """What an engine cannot change without a new worker."""
    said = attached.model, attached.block_size, attached.context_length
    return *said, attached.dp_start, attached.dp_size
