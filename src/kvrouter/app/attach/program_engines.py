"""The engines of a program, of its fleet file or attached one by one, with their workers in its process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.app.attach.attached_fleet import AttachedFleet
from kvrouter.app.attach.attachment import EngineWorkers
from kvrouter.app.attach.running_engine import RunningEngine
from kvrouter.app.attach.spec import attach_spec, with_key, without_credentials
from kvrouter.app.attach.transport_provider import MemoryTransports
from kvrouter.app.mock_fleet import MockFleet, ProcessTransports
from kvrouter.core.errors import ConfigError, InvalidRequest, ShuttingDown
from kvrouter.core.ids import WorkerId
from kvrouter.core.secret import checked_secret
from kvrouter.core.workers import ModelRuntimeConfig, WorkerCard
from kvrouter.engines.attach import AttachSpec
from kvrouter.engines.registry import ENGINES
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.one_worker import ENGINE_PATHS, fleet_of_engine
from kvrouter.kernel.topology.policy import validate_runtime_config
from kvrouter.settings.tree import Settings
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport


def described_engine(
    given: Mapping[str, object],
    *,
    api_key: str | None,
    runtime_config: ModelRuntimeConfig,
    wait_s: float,
    environ: Mapping[str, str],
) -> AttachSpec:
    """Return the spec of the engine that the arguments ``given`` describe, by the names of ``ENGINE_PATHS``.

    Without ``api_key`` it gets the key of ``environ``. Raises ConfigError that names the argument.
    """
    kind = given.get("kind")
    if kind not in ENGINES:
        raise ConfigError(f"kind: must be one of {', '.join(ENGINES)}, not {kind!r}", param="kind")
    if not wait_s >= 0:
        raise ConfigError(f"wait_s: must be ≥ 0, not {wait_s}", param="wait_s")
    validate_runtime_config(runtime_config)
    fleet = fleet_of_engine(given)
    (group,) = fleet.workers
    if not isinstance(group.engine, AttachedEngineSpec):
        raise TypeError(f"{kind} is no engine that is attached")
    spec = attach_spec(
        fleet,
        group,
        group.engine,
        worker_id=WorkerId(0),
        url=group.engine.all_urls[0],
        written_at="",
        fields_at={
            **{name: name for name in ENGINE_PATHS},
            "kv_events": "kv_events_endpoint",
            "kv_events_replay": "kv_events_replay_endpoint",
        },
    )
    if api_key is None:
        spec = with_key(spec, group.engine, environ)
    else:
        spec = replace(spec, api_key=checked_secret(api_key, "api_key"), key_at="api_key")
    return replace(spec, runtime_config=runtime_config, wait_s=wait_s)


class ProgramEngines:
    """Attaches engines while a program runs. ``workers`` starts their workers; ``of_file`` has the engines of
    the program's fleet file, whose workers have the ids up to ``n_of_file``.
    """

    def __init__(
        self,
        transports: ProcessTransports,
        workers: EngineWorkers,
        of_file: AttachedFleet | None = None,
        *,
        n_of_file: int = 0,
    ) -> None:
        self.transports = transports
        self._workers = workers
        self._of_file = of_file
        self._last_id = n_of_file
        self._engines: dict[WorkerId, RunningEngine] = {}
        self._is_closed = False

    def expected(self) -> list[ExpectedEngine]:
        """Every engine, with or without a worker."""
        of_file = [] if self._of_file is None else self._of_file.expected()
        return [*of_file, *(engine.attachment.expected for engine in self._engines.values())]

    async def attach(self, spec: AttachSpec) -> WorkerCard:
        """Attach an engine under a new worker id, and return its worker's card once it serves.

        Raises as :meth:`RunningEngine.start` does, and ConfigError for an engine that is attached already.
        """
        if self._is_closed:
            raise ShuttingDown("this runtime was closed: no engine is attached")
        for known in self.expected():
            if _address_of(known.engine_url or "") == _address_of(spec.url):
                raise ConfigError(
                    f"url: {spec.url} is attached already, by worker {known.worker_id}", param="url"
                )
        self._last_id += 1
        worker_id = WorkerId(self._last_id)
        engine = RunningEngine(replace(spec, worker_id=worker_id), self._workers)
        self._engines[worker_id] = engine
        try:
            return (await engine.start()).card
        except BaseException:
            self._engines.pop(worker_id, None)
            raise

    async def detach(self, worker_id: WorkerId, *, drain_limit_s: float) -> None:
        """Let no new request go to an attached engine, wait for running ones, and end its worker."""
        engine = self._engines.get(worker_id)
        if engine is None:
            raise InvalidRequest(f"worker_id: {worker_id} was not attached here", param="worker_id")
        try:
            await engine.drain(drain_limit_s)
        finally:
            try:
                await engine.stop()
            finally:
                self._engines.pop(worker_id, None)

    async def close(self) -> None:
        """End the workers of the engines that were attached, and of those that are awaited. Idempotent."""
        self._is_closed = True
        engines, self._engines = self._engines, {}
        async with AsyncExitStack() as stack:
            for engine in engines.values():
                stack.push_async_callback(engine.stop)


def _address_of(url: str) -> str:
    """Return what is the same for two spellings of an engine's URL."""
    parts = urlsplit(without_credentials(url))
    return urlunsplit(parts._replace(netloc=parts.netloc.lower())).rstrip("/")


@asynccontextmanager
async def program_engines(
    settings: Settings, fleet: FleetFile | None = None, *, environ: Mapping[str, str]
) -> AsyncIterator[ProgramEngines]:
    """Run the workers of a fleet file's engines, if there is one, and of those that are attached meanwhile.

    Raises ConfigError, with a line for each, for engines that contradict the file.
    """
    async with AsyncExitStack() as stack:
        if fleet is None:
            transports = ProcessTransports(
                MemoryDiscovery(), MemoryEventTransport(), MemoryRequestTransport()
            )
            stack.push_async_callback(transports.requests.close)
            engines = ProgramEngines(transports, EngineWorkers(settings, MemoryTransports(transports)))
        else:
            mock = await stack.enter_async_context(MockFleet(fleet))
            of_file = await stack.enter_async_context(
                AttachedFleet(fleet, settings, mock.transports, environ=environ)
            )
            n_of_file = sum(group.n_workers for group in fleet.workers)
            engines = ProgramEngines(mock.transports, of_file.engine_workers, of_file, n_of_file=n_of_file)
        stack.push_async_callback(engines.close)
        yield engines
