"""``kvrouter worker vllm`` and its like: a worker process for one engine."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from kvrouter.app.attach.attachment import EngineWorkers
from kvrouter.app.attach.running_engine import RunningEngine
from kvrouter.app.attach.transport_provider import open_engine_transports
from kvrouter.app.router_transports import settled
from kvrouter.app.standby import until_free
from kvrouter.cli.worker.worker_process import WorkerProcess, logger
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.transports.records.port import GoneSink
from kvrouter.worker import WorkerTransports
from kvrouter.worker.topology_env import parse_topology_env


class ProcessTransports:
    """The transports of the one worker of this process, from its settings.

    ``on_lost`` is called when another start of its id has its place, which ends the process.
    """

    def __init__(self, settings: Settings, on_lost: GoneSink | None) -> None:
        self._settings = settings
        self._on_lost = on_lost

    @asynccontextmanager
    async def open(self, spec: AttachSpec, attached: Attached) -> AsyncIterator[WorkerTransports]:
        """Connect what the settings ask for; a standby waits until the worker's place is free."""
        async with open_engine_transports(self._settings, spec, attached, self._on_lost) as transports:
            if spec.is_standby:
                await until_free(transports.discovery, spec.worker_id)
            yield transports


@asynccontextmanager
async def engine_worker(
    settings: Settings,
    spec: AttachSpec,
    environ: Mapping[str, str],
    *,
    on_lost: GoneSink | None = None,
    on_engine: Callable[[RunningEngine], None] = lambda _: None,
) -> AsyncIterator[RunningEngine]:
    """Run the worker on this event loop: inside, it serves; ``on_lost`` is called when another has its place,
    ``on_engine`` before the engine is asked.

    Raises the errors of its first start: TopologyUnavailable, ConfigError, or NatsUnreachable.
    """
    topology = parse_topology_env(environ)
    if not spec.pod and settings.planes.pod_name:  # a container next to its engine's, in one pod
        spec = replace(spec, pod=settings.planes.pod_name)
    spec = replace(spec, node=spec.node or settings.planes.node)
    settings = settled(settings, kv_events=spec.publishes_kv_events)
    workers = EngineWorkers(settings, ProcessTransports(settings, on_lost), log=logger)
    engine = RunningEngine(spec, workers, topology=topology if topology.enabled else None)
    on_engine(engine)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def serve_engine_worker(
    settings: Settings, spec: AttachSpec, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

    Returns the exit code, LOST_PLACE when another has the place.
    """
    process = WorkerProcess(settings, spec.worker_id, role=spec.role.value, drain_limit_s=drain_limit_s)

    def on_engine(engine: RunningEngine) -> None:
        process.engine = engine

    return process.serve(
        lambda on_lost: engine_worker(settings, spec, environ, on_lost=on_lost, on_engine=on_engine)
    )
