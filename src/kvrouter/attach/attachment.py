"""The attach loop: probes an engine, runs a worker for it, and attaches again when it changed."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from kvrouter.attach.spec import EngineWorkerSpec, engine_card, tokenizer_of
from kvrouter.attach.transport_provider import TransportProvider
from kvrouter.config import Settings
from kvrouter.config.sources import ENGINE_KEY_VARIABLE
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.attach import Attached, EngineAt, EngineKind
from kvrouter.engines.openai.server import EngineServer, KeyRefused
from kvrouter.engines.sglang.attach import attach_sglang
from kvrouter.engines.sglang.introspect import ask_facts as ask_sglang
from kvrouter.engines.trtllm.attach import attach_trtllm
from kvrouter.engines.trtllm.introspect import ask_facts as ask_trtllm
from kvrouter.engines.vllm.attach import attach_vllm
from kvrouter.engines.vllm.introspect import ask_facts as ask_vllm
from kvrouter.telemetry import Event, log_event
from kvrouter.text.source import tokenizer_folder
from kvrouter.transports.requests.port import WorkerUnreachable
from kvrouter.wiring.tls import advertised
from kvrouter.worker import TopologyEnv, Worker, new_incarnation

logger = logging.getLogger("kvrouter.worker")

Facts = TypeVar("Facts")

ASK_AGAIN_S = 2.0
"""How long after an engine did not answer it is asked again."""

SAID_EACH_S = 30.0
"""How often a log line says that the engine is still waited for."""


AwaitedSink = Callable[[str], None]
"""Hears, each time that an engine did not answer, why."""


def _nobody(*_: object) -> None:
    """The default of a callback: nobody else listens."""


async def attach(at: EngineAt, worker_id: WorkerId, *, on_awaited: AwaitedSink = _nobody) -> Attached:
    """Ask the engine until it answers, and attach it.

    Raises ConfigError whose ``param`` is the field that contradicts what the engine says, and for an engine
    that does not answer in time.
    """
    server = EngineServer(at.url, api_key=at.api_key)

    async def asked(ask: Callable[[EngineServer], Awaitable[Facts]]) -> Facts:
        return await _asked(ask, server, at, worker_id, on_awaited)

    await server.open()
    try:
        match at.kind:
            case EngineKind.VLLM:
                return attach_vllm(server, await asked(ask_vllm), at, worker_id)
            case EngineKind.SGLANG:
                return attach_sglang(server, await asked(ask_sglang), at, worker_id)
            case EngineKind.TRTLLM:
                return attach_trtllm(server, await asked(ask_trtllm), at, worker_id)
    except BaseException:
        await server.close()
        raise


def tell(worker_logger: logging.Logger, worker_id: WorkerId, at: EngineAt, attached: Attached) -> None:
    """Log which engine the worker is attached to, what it said of itself, and the warnings."""
    worker = str(worker_id)
    log_event(
        worker_logger,
        Event.ENGINE_ATTACHED,
        worker=worker,
        url=at.url,
        version=attached.version,
        model=attached.model,
        block_size=attached.block_size,
        context_length=attached.context_length,
        dp_size=attached.dp_size,
        total_kv_blocks=attached.total_kv_blocks,
        publishes_kv_events=attached.publishes_kv_events,
    )
    for warning in attached.warnings:
        log_event(worker_logger, Event.CONFIG_WARNING, worker=worker, detail=warning)


async def _asked(
    ask: Callable[[EngineServer], Awaitable[Facts]],
    server: EngineServer,
    at: EngineAt,
    worker_id: WorkerId,
    on_awaited: AwaitedSink,
) -> Facts:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + at.wait_s
    said_s = loop.time() - SAID_EACH_S
    while True:
        try:
            return await ask(server)
        except KeyRefused as error:
            raise ConfigError(
                f"{error.message}: give its key in {ENGINE_KEY_VARIABLE}", param="url"
            ) from error
        except WorkerUnreachable as error:
            if loop.time() >= until_s:
                raise ConfigError(
                    f"no engine answered within {at.wait_s:g} s: {error.message}", param="url"
                ) from error
            on_awaited(error.message)
            if loop.time() - said_s >= SAID_EACH_S:
                said_s = loop.time()
                log_event(logger, Event.ENGINE_AWAITED, worker=str(worker_id), reason=error.message)
        await asyncio.sleep(ASK_AGAIN_S)


_log = logging.getLogger("kvrouter.up")

TRIED_AGAIN_S = 10.0
"""How long after an engine was refused it is asked again: it may have been restarted as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What is said of an engine, and where.

    ``at`` names it, as ``workers[0].engine.url``. ``places`` maps what an engine may contradict to where
    it is written, or may be: by the name of the field.
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
class AttachedWorker:
    """A worker that serves; ``lost`` is set when another has its place.

    ``said`` is what it was made of; closing ``wires`` stops it first.
    """

    worker: Worker
    said: EngineSpec
    attached: Attached
    lost: asyncio.Event
    wires: AsyncExitStack


class EngineWorkers:
    """The workers of this process: their transports, and what their engines said of themselves.

    ``folders`` has the models whose tokenizers are known here, whatever an engine says of its own; None where
    only frontends elsewhere need them.
    """

    def __init__(
        self, settings: Settings, transports: TransportProvider, *, folders: Collection[ModelName] | None = ()
    ) -> None:
        self._settings = settings
        self._transports = transports
        self._folders = folders
        self._engines: dict[WorkerId, tuple[Attached, EngineSpec]] = {}

    async def start(
        self, said: EngineSpec, attached: Attached, *, rests: Callable[[], bool]
    ) -> AttachedWorker:
        """Start the worker of an engine that answered.

        Raises ConfigError where the engine contradicts what was said of it, or others of its model.
        """
        await self._check(said, attached)
        self._engines[said.worker_id] = attached, said
        wires = AsyncExitStack()
        try:
            tell(_log, said.worker_id, said.spec.at, attached)
            transports = await wires.enter_async_context(self._transports.stand(said.spec, attached))
            incarnation = new_incarnation()
            card = engine_card(
                said.spec,
                attached,
                incarnation=incarnation,
                address=transports.address_of(said.worker_id, incarnation),
                namespace=self._settings.planes.namespace,
                event_source=transports.source,
                here=advertised(self._settings),
            )
            worker = Worker(
                attached.engine,
                msgspec.structs.replace(card, draining=rests()),
                discovery=transports.discovery,
                events=transports.events,
                requests=transports.requests,
                recovery=transports.recovery,
                topology=said.contract,
            )
            await worker.start()
            wires.push_async_callback(worker.stop)
        except BaseException:
            await wires.aclose()
            del self._engines[said.worker_id]
            raise
        return AttachedWorker(worker, said, attached, transports.lost, wires)

    async def end(self, said: EngineSpec, standing: AttachedWorker, *, drain_limit_s: float) -> None:
        """Let running requests finish for so long, and be gone."""
        try:
            if drain_limit_s:
                await standing.worker.drain(drain_limit_s)
        finally:
            self._engines.pop(said.worker_id, None)
            await standing.wires.aclose()

    async def _check(self, said: EngineSpec, attached: Attached) -> None:
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
"""Is called when the engine answered for the first time, or did not."""

Refused = Callable[[KvrouterError], None]
"""Hears why the engine has no worker; again at each try. What is no ConfigError is of the planes."""

Joined = Callable[[Worker], None]
"""Hears of each worker that the engine gets."""


class EngineAttachment:
    """One engine, from its first answer on: :meth:`run`, then :meth:`leave`.

    ``drain_limit_s`` is for how long running requests may go on once another process has the worker's place.
    """

    def __init__(
        self,
        said: EngineSpec,
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
        self._standing: AttachedWorker | None = None

    @property
    def worker(self) -> Worker | None:
        """Its worker, once it has one."""
        return None if self._standing is None else self._standing.worker

    async def run(self) -> None:
        """Let the engine's worker join as soon as the engine answers as was said, and join again when the
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

    async def move(self, said: EngineSpec) -> None:
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

    async def _catch_up(self, standing: AttachedWorker) -> None:
        """Do what was asked for while the worker joined: it began as it was wanted before."""
        await self.rest(self._rests)
        if self.said is not standing.said:
            await self.move(self.said)

    async def _joined(self) -> AttachedWorker:
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

    async def _until_another(self, standing: AttachedWorker) -> str:
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
                    continue  # the worker logs that, and why
                await attached.engine.stop()
                if _fixed_facts(attached) != _fixed_facts(standing.attached):
                    return "was started anew"

    def _refused(self, error: KvrouterError) -> None:
        is_its_own = isinstance(error, ConfigError)
        self.awaited = f"{'was refused' if is_its_own else 'cannot be announced'}: the log says why"
        self._on_refused(error)


def _fixed_facts(attached: Attached) -> tuple[object, ...]:
    """What an engine cannot change without a new worker."""
    said = attached.model, attached.block_size, attached.context_length
    return *said, attached.dp_start, attached.dp_size
