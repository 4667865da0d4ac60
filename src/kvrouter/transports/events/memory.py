"""The event transport within one process."""

from collections.abc import Callable

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport, WorkerCard
from kvrouter.transports.events.port import BLOCKS_MAX, RecoverySource
from kvrouter.transports.events.recovery import answer_for
from kvrouter.transports.events.sinks import EventSinks
from kvrouter.transports.registered import registered


class MemoryEventTransport(EventSinks):
    """Both ends of the event transport within one process, on one event loop.

    Delivery is a direct call of each subscriber, so no queue can fill here: each feed's inbox has the limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[WorkerId, RecoverySource] = {}

    @property
    def source(self) -> EventSource:
        """Return the event source for a card."""
        return EventSource(EventTransport.MEMORY)

    def follow(self, card: WorkerCard) -> Callable[[], None]:  # noqa: ARG002 - every worker is delivered
        """Do nothing: the events of every worker are delivered."""
        return lambda: None

    def publish(self, batch: KvBatch) -> None:
        """Pass a batch to every subscriber."""
        self._deliver(batch)

    def publish_load(self, report: LoadReport) -> None:
        """Pass a load report to every subscriber."""
        self._deliver_load(report)

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return the function that ends it.

        A later source, of the worker's newer incarnation, replaces an earlier one.
        """
        return registered(self._sources, worker_id, source)

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Return the events ``first`` to ``last`` (inclusive), or None when the worker no longer has them."""
        source = self._sources.get(rank.worker_id)
        batch = None if source is None else source.recover_range(rank, first, last)
        return None if batch is None else answer_for(rank, batch)

    async def recover_snapshot(
        self,
        rank: WorkerRank,
        *,
        blocks_max: int = BLOCKS_MAX,  # noqa: ARG002 - the snapshot is in this process already
    ) -> KvSnapshot | None:
        """Return the rank's state from its worker, or None without one."""
        source = self._sources.get(rank.worker_id)
        snapshot = None if source is None else source.recover_snapshot(rank)
        return None if snapshot is None else answer_for(rank, snapshot)
