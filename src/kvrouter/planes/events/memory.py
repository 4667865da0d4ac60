"""The event plane inside one process: a batch reaches its subscribers before ``publish`` returns."""

from collections.abc import Callable
from typing import Protocol

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.planes.events.port import BatchSink, LoadSink


class RecoverySource(Protocol):
    """What a worker's publisher keeps for those who missed something."""

    def recent(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last``, inclusive; None when some of them are gone."""

    def snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state; None when it is not of this worker."""


class MemoryEventPlane:
    """Delivers by calling; keeps nothing itself: recovery asks the worker's own publisher."""

    def __init__(self) -> None:
        self._sinks: list[tuple[BatchSink, LoadSink]] = []
        self._sources: dict[WorkerId, RecoverySource] = {}

    def serve(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Answer recovery for ``worker_id`` from ``source``, until the returned function is called."""
        if worker_id in self._sources:
            raise ConfigError(f"worker {worker_id} publishes already", param="worker_id")
        self._sources[worker_id] = source

        def leave() -> None:
            if self._sources.get(worker_id) is source:
                del self._sources[worker_id]

        return leave

    def publish(self, batch: KvBatch) -> None:
        """Send a batch of KV events."""
        for on_batch, _ in list(self._sinks):
            on_batch(batch)

    def publish_load(self, report: LoadReport) -> None:
        """Send the latest load of one rank."""
        for _, on_load in list(self._sinks):
            on_load(report)

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""
        sinks = (on_batch, on_load)
        self._sinks.append(sinks)

        def stop() -> None:
            if sinks in self._sinks:
                self._sinks.remove(sinks)

        return stop

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when its worker no longer has it."""
        source = self._sources.get(rank.worker_id)
        return None if source is None else source.recent(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state as its worker knows it, or None when there is no one to ask."""
        source = self._sources.get(rank.worker_id)
        return None if source is None else source.snapshot(rank)
