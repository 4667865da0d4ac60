"""``kvrouter worker vllm``: the worker beside an engine that runs already."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from kvrouter.assembly.attach_words import Attached, EngineAt
from kvrouter.assembly.attached import attach, tell
from kvrouter.assembly.router_wires import settled
from kvrouter.assembly.standby import until_free
from kvrouter.assembly.tls import LOOPBACK, advertised
from kvrouter.assembly.worker_process import WorkerProcess, logger
from kvrouter.assembly.worker_wires import worker_wires
from kvrouter.config import Settings
from kvrouter.core.constraints import adapter_taint
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import EventSource, ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.planes.discovery.port import GoneSink
from kvrouter.text.source import is_repository, settled_source
from kvrouter.worker import Worker, new_incarnation
from kvrouter.worker.topology_env import parse_topology_env


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkerSpec:
    """Which worker a process is: its engine, and what no engine knows of itself.

    ``runtime_config`` has its place, its taints and its transfer policy.
    """

    at: EngineAt
    worker_id: WorkerId
    tokenizer: str | None
    runtime_config: ModelRuntimeConfig
    enable_local_indexer: bool = False
    is_standby: bool = False


@dataclass(frozen=True, slots=True)
class RunningEngineWorker:
    """A worker that serves."""

    worker: Worker

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs, and wait up to ``limit_s`` seconds for those that run."""
        return await self.worker.drain(limit_s)


@asynccontextmanager
async def engine_worker(
    settings: Settings,
    spec: EngineWorkerSpec,
    environ: Mapping[str, str],
    *,
    on_lost: GoneSink | None = None,
) -> AsyncIterator[RunningEngineWorker]:
    """Run the worker on this event loop: inside, it serves; ``on_lost`` hears when another has its place.

    Raises TopologyUnavailable, ConfigError, or NatsUnreachable.
    """
    topology = parse_topology_env(environ)
    settings = settled(settings, kv_events=spec.at.publishes_kv_events)
    try:
        attached = await attach(spec.at, spec.worker_id)
    except ConfigError as error:
        raise _of_flag(error) from error
    try:
        tell(logger, spec.worker_id, spec.at, attached)
        async with worker_wires(
            settings,
            component="prefill" if spec.at.role is Role.PREFILL else "backend",
            has_local_indexer=spec.enable_local_indexer,
            publishes_kv_events=attached.publishes_kv_events,
            on_lost=on_lost,
        ) as wires:
            if spec.is_standby:
                await until_free(wires.discovery, spec.worker_id)
            incarnation = new_incarnation()
            worker = Worker(
                attached.engine,
                engine_card(
                    spec,
                    attached,
                    incarnation=incarnation,
                    address=wires.requests.address_of(spec.worker_id, incarnation),
                    namespace=settings.planes.namespace,
                    event_source=wires.events.source,
                    here=advertised(settings),
                ),
                discovery=wires.discovery,
                events=wires.events,
                requests=wires.requests,
                recovery=wires.recovery,
                topology=topology if topology.enabled else None,
            )
            await worker.start()
            try:
                yield RunningEngineWorker(worker)
            finally:
                await worker.stop()
    finally:
        await attached.engine.stop()


def _of_flag(error: ConfigError) -> ConfigError:
    """The same of the command's flag: fields and flags have the same names."""
    flag = (error.param or "").replace("_", "-")
    return ConfigError(f"--{flag}: {error.message}", param=error.param)


def engine_card(
    spec: EngineWorkerSpec,
    attached: Attached,
    *,
    incarnation: Epoch,
    address: str,
    namespace: str,
    event_source: EventSource,
    here: str,
) -> WorkerCard:
    """What the worker publishes. ``here`` is the host under which others reach this one."""
    return WorkerCard(
        worker_id=spec.worker_id,
        incarnation=incarnation,
        model=ModelName(attached.model),
        role=spec.at.role,
        block_size=attached.block_size,
        context_length=attached.context_length,
        address=address,
        dp_size=attached.dp_size,
        dp_start=attached.dp_start,
        namespace=namespace,
        component="prefill" if spec.at.role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if spec.at.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=attached.publishes_kv_events,
        event_source=event_source,
        tokenizer=tokenizer_of(spec, attached),
        takes_calls=True,
        names=attached.names,
        engine=attached.version,
        runtime_config=replace(
            spec.runtime_config,
            taints=spec.runtime_config.taints
            | {adapter_taint(name) for name in attached.names.values() if name is not None},
            total_kv_blocks=attached.total_kv_blocks,
            enable_local_indexer=spec.enable_local_indexer,
            bootstrap_host=None if attached.bootstrap is None else _reached_at(attached.bootstrap[0], here),
            bootstrap_port=None if attached.bootstrap is None else attached.bootstrap[1],
        ),
    )


def tokenizer_of(spec: EngineWorkerSpec, attached: Attached) -> str | None:
    """What the model is tokenized with: what was said, else the engine's own, where that can be read here.

    It is a folder of this host, or a Hugging Face repository.
    """
    own = attached.tokenizer
    can_be_read = Path(own).is_dir() or is_repository(own)
    source = spec.tokenizer or (own if can_be_read else None)
    return None if source is None else settled_source(source)


def _reached_at(engine_host: str, here: str) -> str:
    """Where others reach an engine's host: its worker may know it by a name that holds on this host alone."""
    return here if engine_host in LOOPBACK else engine_host


def serve_engine_worker(
    settings: Settings, spec: EngineWorkerSpec, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

    Returns the exit code, LOST_PLACE when another has the place.
    """
    process = WorkerProcess(settings, spec.worker_id, role=spec.at.role.value, drain_limit_s=drain_limit_s)
    return process.serve(lambda on_lost: engine_worker(settings, spec, environ, on_lost=on_lost))
