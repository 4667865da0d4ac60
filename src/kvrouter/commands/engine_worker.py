"""``kvrouter worker vllm``, ``sglang`` and ``trtllm``: a worker process for one engine."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrouter.attach.attachment import attach, tell
from kvrouter.attach.spec import EngineWorkerSpec, engine_card
from kvrouter.commands.worker_process import WorkerProcess, logger
from kvrouter.config import Settings
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Role
from kvrouter.processes.standby import until_free
from kvrouter.transports.discovery.port import GoneSink
from kvrouter.wiring.router_transports import settled
from kvrouter.wiring.tls import advertised
from kvrouter.wiring.worker_transports import worker_wires
from kvrouter.worker import Worker, new_incarnation
from kvrouter.worker.topology_env import parse_topology_env


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


def serve_engine_worker(
    settings: Settings, spec: EngineWorkerSpec, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

    Returns the exit code, LOST_PLACE when another has the place.
    """
    process = WorkerProcess(settings, spec.worker_id, role=spec.at.role.value, drain_limit_s=drain_limit_s)
    return process.serve(lambda on_lost: engine_worker(settings, spec, environ, on_lost=on_lost))
