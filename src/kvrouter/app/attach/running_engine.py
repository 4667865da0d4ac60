"""A running engine with its worker on this event loop, and the task that keeps it attached."""

import asyncio

from kvrouter.app.attach.attachment import EngineAttachment, EngineWorkers
from kvrouter.core.errors import KvrouterError, ShuttingDown
from kvrouter.engines.attach import AttachSpec
from kvrouter.telemetry import Event, log_event
from kvrouter.worker import TopologyEnv, Worker


class RunningEngine:
    """One engine that is attached: :meth:`start`, then :meth:`stop`.

    An engine that restarts later as another one, and contradicts ``spec``, is logged, and asked again.
    ``topology`` is the worker's own topology environment. Call it on an event loop.
    """

    def __init__(
        self, spec: AttachSpec, workers: EngineWorkers, *, topology: TopologyEnv | None = None
    ) -> None:
        self._log = workers.log
        self._serves: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self.attachment = EngineAttachment(
            spec, workers, topology=topology, on_refused=self._on_refused, on_joined=self._on_joined
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def worker(self) -> Worker | None:
        """The current worker; None while its engine, which was started as another one, is attached again."""
        return self.attachment.worker

    async def start(self) -> Worker:
        """Return the worker as soon as it serves.

        Raises ConfigError for an engine that contradicts its spec or does not answer in time, the errors of
        the worker's transports and topology, and ShuttingDown when it was stopped meanwhile; nothing keeps
        running then.
        """
        self._task = asyncio.create_task(self.attachment.run())
        try:
            return await self._serves
        except BaseException:
            await self.stop()
            raise

    async def drain(self, limit_s: float) -> bool:
        """Take no new legs, and wait up to ``limit_s`` seconds for those that run; the engine is attached no
        more.
        """
        await self._end_task()
        return self.worker is None or await self.worker.drain(limit_s)

    async def stop(self) -> None:
        """Stop the worker, and attach the engine no more. Idempotent."""
        if not self._serves.done():
            self._serves.set_exception(ShuttingDown(f"{self.attachment.spec.url} is attached no more"))
        await self._end_task()
        await self.attachment.leave()

    async def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _on_joined(self, worker: Worker) -> None:
        if not self._serves.done():
            self._serves.set_result(worker)

    def _on_refused(self, error: KvrouterError) -> None:
        if not self._serves.done():
            self._serves.set_exception(error)
            return
        spec = self.attachment.spec
        worker, model = str(spec.worker_id), spec.model or "unknown"
        log_event(self._log, Event.WORKER_REFUSED, worker=worker, model=model, reason=error.message)
