"""The attach loop: probes an engine, runs a worker for it, and attaches again after the engine changed."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import cast

import msgspec

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.app.attach.spec import engine_card, without_credentials
from kvrouter.app.attach.transport_provider import TransportProvider
from kvrouter.app.tls import advertised
from kvrouter.core.errors import ConfigError, InternalError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import SEVERAL_ENGINES, Role
from kvrouter.engines.attach import Attached, AttachEngine, AttachSpec, KeyRefused
from kvrouter.engines.registry import ENGINES
from kvrouter.settings.tree import Settings
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.log_forms import cut
from kvrouter.transports.requests.port import WorkerUnreachable
from kvrouter.worker import TopologyEnv, Worker, new_incarnation

logger = logging.getLogger("kvrouter.worker")

UP_LOG = logging.getLogger("kvrouter.up")
"""The log for engines whose workers share a process."""

PROBE_EVERY_S = 2.0
"""Seconds between two probes of an engine that does not answer."""

AWAITED_LOG_EVERY_S = 30.0
"""Seconds between two log lines about an engine that does not answer."""


AwaitedSink = Callable[[str], None]
"""Called with the reason after each probe without an answer."""


def _ignore(*_: object) -> None:
    """The default of a callback: does nothing."""


class NotAnswered(ConfigError):
    """The engine did not answer in time."""


async def attach(spec: AttachSpec, *, on_awaited: AwaitedSink = _ignore) -> Attached:
    """Probe the engine until it answers, then attach it.

    Raises ConfigError whose ``param`` is the field that contradicts the engine's answer, and NotAnswered
    after ``spec.wait_s`` seconds without an answer.
    """
    attach_engine = cast("AttachEngine", import_module(f"{ENGINES[spec.kind]}.attach").attach)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + spec.wait_s
    logged_s = loop.time() - AWAITED_LOG_EVERY_S
    while True:
        try:
            return await attach_engine(spec)
        except KeyRefused as error:
            raise ConfigError(f"{error.message}: {_about_key(spec)}", param="url") from error
        except WorkerUnreachable as error:
            if loop.time() >= until_s:
                within = f" within {spec.wait_s:g} s" if spec.wait_s else ""
                raise NotAnswered(f"no engine answered{within}: {error.message}", param="url") from error
            on_awaited(error.message)
            if loop.time() - logged_s >= AWAITED_LOG_EVERY_S:
                logged_s = loop.time()
                log_event(logger, Event.ENGINE_AWAITED, worker=str(spec.worker_id), reason=error.message)
        await asyncio.sleep(PROBE_EVERY_S)


async def probe(spec: AttachSpec) -> Attached:
    """Return what an engine says of itself, asked once: model, tokenizer, block size, context length, ranks,
    whether it publishes KV events, and warnings. No worker is started, and its adapter is stopped already.

    Raises NotAnswered, whose cause has the reason, where it does not answer, and ConfigError as
    :func:`attach` does. It needs a ``kind`` and a ``url`` of ``spec``; further fields are compared.
    """
    attached = await attach(replace(spec, wait_s=0.0))
    await attached.engine.stop()
    return attached


def _about_key(spec: AttachSpec) -> str:
    at = spec.key_at or ENGINE_KEY_VARIABLE
    return f"give its key in {at}" if spec.api_key is None else f"it takes another key than that of {at}"


def log_attached(worker_logger: logging.Logger, spec: AttachSpec, attached: Attached) -> None:
    """Log the engine that the worker is attached to, its own figures, and the warnings."""
    worker = str(spec.worker_id)
    log_event(
        worker_logger,
        Event.ENGINE_ATTACHED,
        worker=worker,
        url=spec.url,
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


RETRY_AFTER_S = 10.0
"""Seconds until a refused engine is probed again: it may have been restarted with correct settings."""


@dataclass(frozen=True, slots=True)
class AttachedWorker:
    """A serving worker; ``lost`` is set when another process replaced it.

    ``spec`` is the requested engine; closing ``stack`` stops the worker and then closes its transports.
    """

    worker: Worker
    spec: AttachSpec
    attached: Attached
    lost: asyncio.Event
    stack: AsyncExitStack


class EngineWorkers:
    """Starts and stops the workers of this process, and checks their engines against each other.

    Events are logged to ``log``.
    """

    def __init__(
        self,
        settings: Settings,
        transports: TransportProvider,
        *,
        log: logging.Logger = UP_LOG,
    ) -> None:
        self._settings = settings
        self._transports = transports
        self.log = log
        self._engines: dict[WorkerId, tuple[Attached, AttachSpec]] = {}

    async def start(
        self,
        spec: AttachSpec,
        attached: Attached,
        *,
        topology: TopologyEnv | None,
        draining: Callable[[], bool],
    ) -> AttachedWorker:
        """Start the worker of an engine that answered and was checked. ``topology`` is the worker's own
        topology environment; ``draining`` returns whether it starts without new requests.
        """
        self._engines[spec.worker_id] = attached, spec
        stack = AsyncExitStack()
        try:
            log_attached(self.log, spec, attached)
            transports = await stack.enter_async_context(self._transports.open(spec, attached))
            incarnation = new_incarnation()
            card = engine_card(
                spec,
                attached,
                incarnation=incarnation,
                address=transports.requests.address_of(spec.worker_id, incarnation),
                namespace=self._settings.planes.namespace,
                event_source=transports.events.source,
                here=advertised(self._settings),
            )
            worker = Worker(
                attached.engine,
                msgspec.structs.replace(card, draining=draining()),
                discovery=transports.discovery,
                events=transports.events,
                requests=transports.requests,
                recovery=transports.recovery,
                topology=topology,
            )
            await worker.start()
            stack.push_async_callback(worker.stop)
        except BaseException:
            await stack.aclose()
            del self._engines[spec.worker_id]
            raise
        return AttachedWorker(worker, spec, attached, transports.lost, stack)

    async def end(self, spec: AttachSpec, attached_worker: AttachedWorker, *, drain_limit_s: float) -> None:
        """Stop the worker, after running requests have had ``drain_limit_s`` seconds to finish."""
        try:
            if drain_limit_s:
                await attached_worker.worker.drain(drain_limit_s)
        finally:
            self._engines.pop(spec.worker_id, None)
            await attached_worker.stack.aclose()

    def check(self, spec: AttachSpec, attached: Attached) -> None:
        """Raise ConfigError where the engine contradicts its spec, or other engines of its model."""
        if spec.dp_size not in (None, attached.dp_size):
            raise spec.mistake(
                f"the engine has {attached.dp_size} data-parallel ranks, not {spec.dp_size}: leave it out",
                param="dp_size",
            )
        for other, its in self._engines.values():
            if other.model != attached.model or its.worker_id == spec.worker_id:
                continue
            kind, its_kind = spec.kind, its.kind
            if Role.PREFILL in (spec.role, its.role) and kind != its_kind:
                raise spec.mistake(
                    f"must be {its_kind!r}, as that of {its.place}: KV goes between engines of one kind",
                    param="kind",
                )
            if _differ(other.block_size, attached.block_size):
                raise spec.mistake(
                    f"the engine's blocks have {attached.block_size} tokens, and those of "
                    f"{its.place} have {other.block_size}: engines of one model have blocks of one size",
                    param="block_size",
                )
            if _differ(other.context_length, attached.context_length):
                raise spec.mistake(
                    f"the engine's context holds {attached.context_length} tokens, and that of "
                    f"{its.place} {other.context_length}: start both with the same one, or give both the "
                    "smaller one, such as in a fleet file",
                    param="context_length",
                )


def _differ(one: int | None, other: int | None) -> bool:
    """Whether two figures contradict each other; an unknown figure contradicts none."""
    return one is not None and other is not None and one != other


AttemptEnded = Callable[[], None]
"""Called after each attempt to attach the engine, whether it succeeded or not."""

Refused = Callable[[KvrouterError], None]
"""Called with the reason why the engine has no worker, once for each reason until it has one. An error that
is no ConfigError comes from the transports, or is an internal error.
"""

Joined = Callable[[Worker], None]
"""Called with each worker that the engine gets."""


StateChanged = Callable[[], None]
"""Called when the state of :attr:`EngineAttachment.expected` changes."""


SERVED_ELSEWHERE = "it is served by another process"
ANNOUNCING = "it answered, and is announced once no other process serves it"


def expected_engine(spec: AttachSpec) -> ExpectedEngine:
    """Return the record of an engine that was not asked yet."""
    return ExpectedEngine(
        written_at=spec.written_at,
        engine_url=without_credentials(spec.url),
        worker_id=spec.worker_id,
        kind=spec.kind,
        role=spec.role,
        model=spec.model,
        pod=spec.pod or None,
        state=ExpectedState.AWAITED,
        reason="it is being asked",
        since_s=round(time.time(), 3),
    )


def without_place(reason: str, spec: AttachSpec) -> str:
    """Return a reason without the place and URL of the engine at its beginning, which its record has, and
    without the password of the URL.
    """
    url = spec.url.rstrip("/")
    rest = reason.removeprefix(f"{spec.written_at}: ").removeprefix(f"{spec.url}: ").removeprefix(url)
    return str(cut(rest.strip().replace(url, without_credentials(url))))


class EngineAttachment:
    """Keeps one engine attached, from its first answer on: :meth:`run`, then :meth:`leave`.

    ``topology`` is the worker's own topology environment. ``drain_limit_s`` is how long running requests may
    go on after another process replaced the worker.
    """

    def __init__(
        self,
        spec: AttachSpec,
        workers: EngineWorkers,
        *,
        on_refused: Refused,
        topology: TopologyEnv | None = None,
        on_attempt_ended: AttemptEnded = _ignore,
        on_joined: Joined = _ignore,
        on_state: StateChanged = _ignore,
        drain_limit_s: float = 0.0,
    ) -> None:
        self.spec = spec
        self._expected = expected_engine(spec)
        self._announcing = ANNOUNCING
        """Why an engine that answered has no worker."""

        self._workers = workers
        self._topology = topology
        self._wait_s = spec.wait_s
        self._on_refused = on_refused
        self._on_attempt_ended = on_attempt_ended
        self._on_joined = on_joined
        self._on_state = on_state
        self._drain_limit_s = drain_limit_s
        self._draining = False
        self._refusal = ""
        """The last reported reason; cleared when a worker joins."""
        self._attached_worker: AttachedWorker | None = None

    @property
    def expected(self) -> ExpectedEngine:
        """The engine, its state, and why it has no worker, or what is wrong with its URL."""
        card = None if self.worker is None else self.worker.card
        if card is None or not card.several_engines:
            return self._expected
        return msgspec.structs.replace(self._expected, reason=f"{card.engine_url} {SEVERAL_ENGINES}")

    @property
    def worker(self) -> Worker | None:
        """The engine's worker; None while it has none."""
        return None if self._attached_worker is None else self._attached_worker.worker

    async def run(self) -> None:
        """Run the engine's worker once the engine answers as its spec asks, and again whenever the engine was
        restarted with another model, block size, context length or ranks; until cancelled.
        """
        while True:
            try:
                attached_worker = self._attached_worker = await self._joined()
                self._note(ExpectedState.JOINED, model=attached_worker.worker.card.model)
                await self._catch_up(attached_worker)
                self._wait_s, self._refusal = math.inf, ""
                self._on_joined(attached_worker.worker)
                self._on_attempt_ended()
                why = await self._until_another(attached_worker)
                self._note(ExpectedState.AWAITED, why)
                is_lost = attached_worker.lost.is_set()
                self._announcing = why
                await self.leave(drain_limit_s=self._drain_limit_s if is_lost else 0.0)
                continue
            except KvrouterError as error:
                self._refused(error)
            except Exception as error:  # noqa: BLE001 - an internal error is logged, and stops no other engine
                self._mistaken(error)
                self._refused(InternalError(f"{self.spec.url}: a mistake of ours; the log has the traceback"))
            self._on_attempt_ended()
            try:
                await self.leave()
            except Exception as error:  # noqa: BLE001 - the same
                self._mistaken(error)
            await asyncio.sleep(RETRY_AFTER_S)

    async def set_draining(self, draining: bool) -> None:
        """Set whether the worker refuses new requests; running ones go on."""
        self._draining = draining
        if self.worker is not None and self.worker.card.draining != draining:
            await (self.worker.begin_drain() if draining else self.worker.end_drain())

    async def move(self, spec: AttachSpec) -> None:
        """Update the engine's topology domains; the rest of ``spec`` is unchanged."""
        self.spec = spec
        if self.worker is not None:
            config, place = self.worker.card.runtime_config, spec.runtime_config
            await self.worker.publish_runtime_config(
                msgspec.structs.replace(
                    config, topology_domains=place.topology_domains, topology_levels=place.topology_levels
                )
            )

    async def leave(self, *, drain_limit_s: float = 0.0) -> None:
        """Stop the worker, after running requests had ``drain_limit_s`` seconds to finish; idempotent."""
        attached_worker, self._attached_worker = self._attached_worker, None
        if attached_worker is not None:
            await self._workers.end(self.spec, attached_worker, drain_limit_s=drain_limit_s)

    async def _catch_up(self, attached_worker: AttachedWorker) -> None:
        """Apply changes that were requested while the worker was joining."""
        await self.set_draining(self._draining)
        if self.spec is not attached_worker.spec:
            await self.move(self.spec)

    async def _joined(self) -> AttachedWorker:
        attached = await self._attached()
        try:
            self._workers.check(self.spec, attached)  # before: a refused engine stays refused
            self._note(ExpectedState.AWAITED, self._announcing)
            return await self._workers.start(
                self.spec, attached, topology=self._topology, draining=lambda: self._draining
            )
        except BaseException:
            await attached.engine.stop()
            raise

    async def _attached(self) -> Attached:
        spec = replace(self.spec, wait_s=self._wait_s)
        try:
            return await attach(spec, on_awaited=self._on_awaited)
        except KvrouterError as error:
            raise self.spec.mistake(error.message, param=error.param) from error

    async def _until_another(self, attached_worker: AttachedWorker) -> str:
        """Wait until a silent engine answers with figures other than its card's, or another process replaced
        the worker; return which, in words. Raises ConfigError for a new engine that contradicts the spec. An
        engine whose pages cannot be read keeps its worker.
        """
        while True:
            try:
                async with asyncio.timeout(RETRY_AFTER_S):
                    await attached_worker.lost.wait()
                return SERVED_ELSEWHERE
            except TimeoutError:
                pass
            if attached_worker.worker.card.engine_silent:
                try:
                    attached = await probe(self.spec)
                except KvrouterError as error:
                    if self.spec.is_contradicted_by(error):
                        raise self.spec.mistake(error.message, param=error.param) from error
                    continue  # it may be the same engine with running legs: the worker logs the reason
                if not attached.is_same_as(attached_worker.attached):
                    return "it was restarted as another engine, and is attached again"

    def _refused(self, error: KvrouterError) -> None:
        if isinstance(error, ConfigError):
            self._note(ExpectedState.REFUSED, error.message)
        else:
            self._note(ExpectedState.AWAITED, f"it cannot be announced: {error.message}")
        if error.message != self._refusal:
            self._refusal = error.message
            self._on_refused(error)

    def _on_awaited(self, why: str) -> None:
        self._note(ExpectedState.AWAITED, why)
        self._on_attempt_ended()

    def _note(self, state: ExpectedState, reason: str | None = None, *, model: str | None = None) -> None:
        """Set the state of the engine; ``reason`` may begin with where the engine is, which is left out."""
        before = self._expected
        if reason is not None:
            reason = without_place(reason, self.spec)
        self._expected = msgspec.structs.replace(
            before,
            state=state,
            reason=reason,
            model=model or before.model,
            since_s=before.since_s if before.state == state else round(time.time(), 3),
        )
        if before.state != state:
            self._on_state()

    def _mistaken(self, error: Exception) -> None:
        worker = str(self.spec.worker_id)
        log_event(self._workers.log, Event.INTERNAL_ERROR, worker=worker, exc_info=error)
