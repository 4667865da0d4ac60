"""Worker: serves legs of requests for one engine, publishes its events and load, and registers it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, ShuttingDown
from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, LoadReport, ModelRuntimeConfig, WorkerCard
from kvrouter.engines.port import Engine, EngineState, SnapshotEngine, WatchedEngine
from kvrouter.kernel.topology.policy import validate_runtime_config
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.logs import LogThrottle
from kvrouter.transports.events.port import EventPublisher, RecoveryServer
from kvrouter.transports.records.port import Discovery
from kvrouter.transports.requests.port import EngineStream, Registration, RequestAcceptor
from kvrouter.worker.kv_publisher import KvPublisher
from kvrouter.worker.topology import topology_config, wait_for_topology, watch_topology
from kvrouter.worker.topology_env import TopologyEnv

GRACE_S = 1.0
"""How much longer than its request a leg may run, so that the router's error comes first."""

TIME_LEFT_MAX_S = 7 * 86_400.0
"""The longest time of a leg, whatever a router allows."""

REASON = "the time of its request was up"


class TimedStream:
    """The stream of a leg that may run for ``time_left_s`` seconds from now, and ``grace_s`` more.

    Then the engine is asked to stop, and the reader gets :class:`DeadlineExceeded`. A leg that ended in time
    is not affected.
    """

    __slots__ = ("_inner", "_is_over_time", "_timer")

    def __init__(self, inner: EngineStream, time_left_s: float, *, grace_s: float = GRACE_S) -> None:
        # NaN and negative values mean that no time is left.
        left_s = min(time_left_s, TIME_LEFT_MAX_S) if time_left_s > 0 else 0.0
        self._inner = inner
        self._is_over_time = False
        self._timer = asyncio.get_running_loop().call_later(left_s + grace_s, self._end)

    def __aiter__(self) -> "TimedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        try:
            chunk = await self._inner.__anext__()
        except Exception:
            self._timer.cancel()
            raise
        if chunk.finish is not None:
            self._timer.cancel()
            if self._is_over_time:
                raise DeadlineExceeded(REASON)
        return chunk

    def cancel(self, reason: str) -> None:
        """Ask the engine to stop and free its resources; idempotent, allowed at any time."""
        self._timer.cancel()
        self._inner.cancel(reason)

    def _end(self) -> None:
        self._is_over_time = True
        self._inner.cancel(REASON)


HEARTBEAT_S = 5.0
"""Seconds between heartbeats, which repeat the next event ids and the latest loads: routers notice a lost
last batch, and replace a lost report, within this time.
"""

SKIPPED_AGAIN_S = 3600.0
"""The least time between two log lines about KV events skipped for the same reason."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerTransports:
    """The transports of one worker; ``lost`` is set when a newer start of its id replaced it."""

    discovery: Discovery
    requests: RequestAcceptor
    events: EventPublisher
    recovery: RecoveryServer
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """One engine in the fleet: ``start``, ``drain``, ``stop``; ``die`` ends it without deregistering.

    With ``topology`` the worker starts once its domains are known, and publishes its card again when they
    change. With ``engine_tells_events`` False another source feeds :attr:`publisher`, such as an
    :class:`EngineDoor`; the engine's own KV events are dropped.
    """

    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        *,
        discovery: Discovery,
        events: EventPublisher,
        requests: RequestAcceptor,
        recovery: RecoveryServer,
        topology: TopologyEnv | None = None,
        engine_tells_events: bool = True,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.engine = engine
        self.card = card
        self._discovery = discovery
        self._events = events
        self._requests = requests
        self._recovery = recovery
        self._topology = topology
        self._engine_tells_events = engine_tells_events
        self._heartbeat_s = heartbeat_s
        self._dp_ranks = tuple(rank.dp_rank for rank in card.ranks())
        self._tasks: list[asyncio.Task[None]] = []
        self._registration: Registration | None = None
        self._end_recovery: Callable[[], None] | None = None
        self._drain_read_s: float | None = None
        """When routers have read the drain, by the event loop's clock; None while none was published."""
        self._skipped: dict[DpRank, Mapping[str, int]] = {}
        account = engine if engine_tells_events and isinstance(engine, SnapshotEngine) else None
        self.publisher = KvPublisher(
            events,
            worker_id=card.worker_id,
            epoch=card.incarnation,
            block_size=card.block_size or BLOCK_SIZE_UNKNOWN,
            snapshot=None if account is None else account.snapshot,
            held_blocks=None if account is None else account.held_blocks,
        )
        self._engine_state = EngineState()
        self._engine_changed = asyncio.Event()
        self._has_warned_of_rank = False
        self._skipped_throttle = LogThrottle(again_after_s=SKIPPED_AGAIN_S)

    @property
    def running_legs(self) -> int:
        """How many legs are running."""
        return 0 if self._registration is None else self._registration.running_legs

    async def start(self) -> None:
        """Read the topology, serve, then publish the card, so that a router that finds the worker can use it.

        Raises TopologyUnavailable when the topology stays unknown, ConfigError for an invalid config.
        """
        if self._topology is not None:
            reading = await wait_for_topology(self._topology)
            config = topology_config(self.card.runtime_config, self._topology, reading)
            self.card = replace(self.card, runtime_config=config)
            self._warn(self._topology.warnings + reading.warnings)
        self._warn(tuple(validate_runtime_config(self.card.runtime_config)))
        if isinstance(self.engine, WatchedEngine):
            self.engine.watch(self._on_state)
        await self.engine.start(self._on_events, self._on_load)
        try:
            self._end_recovery = self._recovery.serve_recovery(self.card.worker_id, self.publisher)
            self._registration = self._requests.serve(self.card.address, self)
            await self._registration.served()
            await self._discovery.publish(self.card)
        except BaseException:
            await self.stop()
            raise
        self._run(self._beat())
        if isinstance(self.engine, WatchedEngine):
            self._run(self._follow_engine())
        if self._topology is not None:
            self._run(watch_topology(self._topology, self.card.runtime_config, self._moved))

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept a leg.

        Raises ShuttingDown while the worker drains or its engine does not answer, so that the router tries
        another worker, and InvalidRequest for another model or an unknown rank.
        """
        if self.card.draining:
            raise ShuttingDown(f"worker {self.card.worker_id} is draining")
        if self.card.engine_silent:
            raise ShuttingDown(f"the engine of worker {self.card.worker_id} does not answer")
        if request.model != self.card.model:
            raise InvalidRequest(
                f"worker {self.card.worker_id} serves {self.card.model}, not {request.model}", param="model"
            )
        if request.dp_rank not in self._dp_ranks:
            raise InvalidRequest(
                f"worker {self.card.worker_id} has no dp_rank {request.dp_rank}", param="dp_rank"
            )
        stream = await self.engine.submit(request)
        return stream if request.time_left_s is None else TimedStream(stream, request.time_left_s)

    async def publish_runtime_config(self, config: ModelRuntimeConfig) -> None:
        """Publish the card with another runtime config, for example after a topology label changed."""
        self.card = replace(self.card, runtime_config=config)
        await self._discovery.publish(self.card)

    async def begin_drain(self) -> None:
        """Refuse new legs; running ones go on."""
        self.card = replace(self.card, draining=True)
        await self._discovery.publish(self.card)
        if self.card.draining and self._drain_read_s is None:
            self._drain_read_s = asyncio.get_running_loop().time() + self._discovery.propagation_s

    async def end_drain(self) -> None:
        """Accept new legs again."""
        self._drain_read_s = None
        self.card = replace(self.card, draining=False)
        await self._discovery.publish(self.card)

    async def drain(self, limit_s: float) -> bool:
        """Refuse new legs, wait up to ``limit_s`` seconds for the running ones, and leave the fleet as
        :meth:`stop` does.

        Returns whether every leg had ended within the limit.
        """
        await self.begin_drain()
        is_idle = await self.wait_idle(limit_s)
        await self.stop()
        return is_idle

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no leg runs, for at most ``limit_s`` seconds; return whether none is left."""
        return self._registration is None or await self._registration.wait_idle(limit_s)

    async def stop(self) -> None:
        """Deregister, then stop serving. Idempotent.

        A worker that drains goes on refusing legs until routers have read that: a leg that is refused costs
        its request no retry, a leg to a closed socket does. The card is withdrawn before that, so that a
        process that is killed meanwhile leaves none; and from then on a standby may have the worker's id, so
        nothing is published under it and nobody is told its history.
        """
        self._end_tasks()
        try:
            await self._discovery.withdraw(self.card.worker_id, self.card.incarnation)
            self._end_events()
            if self._drain_read_s is not None and self._registration is not None:
                await asyncio.sleep(self._drain_read_s - asyncio.get_running_loop().time())
        finally:
            self._leave("the worker was stopped")
            await self.engine.stop()

    def die(self, why: str) -> None:
        """End without deregistering: the card stays until discovery removes it."""
        self._leave(why)

    def _end_tasks(self) -> None:
        """End what might publish the card again."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _end_events(self) -> None:
        self.publisher.close()
        if self._end_recovery is not None:
            self._end_recovery()
            self._end_recovery = None

    def _leave(self, why: str) -> None:
        self._end_tasks()
        self._end_events()
        if self._registration is not None:
            self._registration.leave(why)
            self._registration = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.publisher.heartbeat(self._dp_ranks if self.card.publishes_kv_events else ())

    async def _follow_engine(self) -> None:
        """Publish the card when the engine's state changes; routers send no requests to a silent engine."""
        while True:
            await self._engine_changed.wait()
            self._engine_changed.clear()
            state = self._engine_state
            card = replace(
                self.card,
                engine_silent=not state.answers,
                cache_is_partial=not state.knows_cache,
                lookahead_tokens=state.lookahead_tokens,
                several_engines=state.several_engines,
                engine_start=self.card.engine_start if state.start is None else state.start,
            )
            if card != self.card:
                self.card = card
                await self._discovery.publish(card)

    async def _moved(self, config: ModelRuntimeConfig, warnings: tuple[str, ...]) -> None:
        self._warn(warnings)
        places = ",".join(f"{domain}={value}" for domain, value in config.topology_domains.items())
        log_event(
            _log, Event.WORKER_CHANGED, worker=str(self.card.worker_id), reason=f"topology is now: {places}"
        )
        here = replace(self.card.runtime_config, topology_domains=config.topology_domains)
        await self.publish_runtime_config(here)

    def _warn(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            log_event(_log, Event.CONFIG_WARNING, worker=str(self.card.worker_id), detail=warning)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._report)
        self._tasks.append(task)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(_log, Event.INTERNAL_ERROR, worker=str(self.card.worker_id), exc_info=error)

    def _on_state(self, state: EngineState) -> None:
        before, self._engine_state = self._engine_state, state
        worker = str(self.card.worker_id)
        if state.answers is not before.answers:
            event = Event.ENGINE_ANSWERS if state.answers else Event.ENGINE_SILENT
            log_event(_log, event, worker=worker, reason=state.why)
        if state.several_engines is not before.several_engines:
            event = Event.SEVERAL_ENGINES if state.several_engines else Event.ONE_ENGINE
            log_event(_log, event, worker=worker, reason=state.why)
        elif before.knows_cache and not state.knows_cache:
            log_event(_log, Event.CACHE_PARTIAL, worker=worker, reason=state.why)
        self._engine_changed.set()

    def _on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        if not (self.card.publishes_kv_events and self._engine_tells_events):
            return
        if dp_rank in self._dp_ranks:
            self.publisher.publish(dp_rank, events)
        elif not self._has_warned_of_rank:
            self._has_warned_of_rank = True
            here = ", ".join(map(str, self._dp_ranks))
            self._warn((f"KV events of dp_rank {dp_rank} are dropped: this worker has dp_rank {here}",))

    def _on_load(self, report: LoadReport) -> None:
        self.publisher.publish_load_report(report)
        before = self._skipped.get(report.rank.dp_rank, {})
        if report.kv_events_skipped != before:
            self._skipped[report.rank.dp_rank] = report.kv_events_skipped
            self._log_skipped(report, before)

    def _log_skipped(self, report: LoadReport, before: Mapping[str, int]) -> None:
        """Log skipped events at a limited rate: workers have no metrics page."""
        dp_rank, skipped = report.rank.dp_rank, report.kv_events_skipped
        counted = [reason for reason, n in skipped.items() if n != before.get(reason, 0)]
        logged = [reason for reason in counted if self._skipped_throttle.allows(f"{dp_rank} {reason}")]
        if logged:
            counts = ", ".join(f"{reason} {n}" for reason, n in skipped.items())
            worker = str(self.card.worker_id)
            log_event(_log, Event.KV_EVENTS_SKIPPED, worker=worker, dp_rank=dp_rank, reason=counts)
