"""``kvrouter worker vllm`` and its like: a worker process for one engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from kvrouter.app.attach.attachment import EngineAttachment, EngineWorkers
from kvrouter.app.attach.transport_provider import open_engine_transports
from kvrouter.app.router_transports import settled
from kvrouter.app.standby import until_free
from kvrouter.cli.worker.worker_process import WorkerProcess, logger
from kvrouter.core.errors import KvrouterError
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.records.port import GoneSink
from kvrouter.worker import Worker, WorkerTransports
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


class RunningEngineWorker:
    """A worker that serves, and the task that keeps its engine attached."""

    def __init__(self, attachment: EngineAttachment, task: asyncio.Task[None]) -> None:
        self._attachment = attachment
        self._task = task

    @property
    def worker(self) -> Worker | None:
        """It; None while its engine, which was started as another one, is attached again."""
        return self._attachment.worker

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs, and wait up to ``limit_s`` seconds for those that run; the engine is attached no
        more.
        """
        self._task.cancel()
        await asyncio.wait({self._task})
        return self.worker is None or await self.worker.drain(limit_s)


@asynccontextmanager
async def engine_worker(
    settings: Settings,
    spec: AttachSpec,
    environ: Mapping[str, str],
    *,
    on_lost: GoneSink | None = None,
) -> AsyncIterator[RunningEngineWorker]:
    """Run the worker on this event loop: inside, it serves; ``on_lost`` is called when another has its place.

    Raises the errors of its first start: TopologyUnavailable, ConfigError, or NatsUnreachable. An engine that
    restarts as another one later, and contradicts ``spec``, is logged, and asked again.
    """
    topology = parse_topology_env(environ)
    if not spec.pod and settings.planes.pod_name:  # a container next to its engine's, in one pod
        spec = replace(spec, pod=settings.planes.pod_name)
    spec = replace(spec, node=spec.node or settings.planes.node)
    settings = settled(settings, kv_events=spec.publishes_kv_events)
    workers = EngineWorkers(settings, ProcessTransports(settings, on_lost), log=logger)
    serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_joined(_: Worker) -> None:
        if not serves.done():
            serves.set_result(None)

    def on_refused(error: KvrouterError) -> None:
        if not serves.done():
            serves.set_exception(error)
            return
        worker, model = str(spec.worker_id), spec.model or "unknown"
        log_event(logger, Event.WORKER_REFUSED, worker=worker, model=model, reason=error.message)

    attachment = EngineAttachment(
        spec,
        workers,
        topology=topology if topology.enabled else None,
        on_refused=on_refused,
        on_joined=on_joined,
    )
    task = asyncio.create_task(attachment.run())
    try:
        await serves
        yield RunningEngineWorker(attachment, task)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await attachment.leave()


def serve_engine_worker(
    settings: Settings, spec: AttachSpec, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Serve until SIGTERM or SIGINT, or until another has the worker's place; then drain.

    Returns the exit code, LOST_PLACE when another has the place.
    """
    process = WorkerProcess(settings, spec.worker_id, role=spec.role.value, drain_limit_s=drain_limit_s)
    return process.serve(lambda on_lost: engine_worker(settings, spec, environ, on_lost=on_lost))
