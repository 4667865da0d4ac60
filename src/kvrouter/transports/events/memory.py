"""KV events within one process."""

from collections.abc import Callable

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport, WorkerCard
from kvrouter.transports.events.port import BLOCKS_MAX, RecoverySource
from kvrouter.transports.events.recovery import answer_for
from kvrouter.transports.events.sinks import EventSinks


class MemoryEventPlane(EventSinks):
    """Both ends of the event plane for one process. Use it from one event loop.

    Delivery is a plain call per subscriber, so there is no queue here that could fill: the limit is the
    inbox of each feed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[WorkerId, RecoverySource] = {}

    @property
    def source(self) -> EventSource:
        """What a card says."""
        return EventSource(EventTransport.MEMORY)

    def follow(self, card: WorkerCard) -> Callable[[], None]:  # noqa: ARG002 - every worker here is heard
        """Nothing to do: who publishes here is heard."""
        return lambda: None

    def publish(self, batch: KvBatch) -> None:
        """Hand a batch to every subscriber."""
        self._hand(batch)

    def publish_load(self, report: LoadReport) -> None:
        """Hand a load report to every subscriber."""
        self._hand_load(report)

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return the function that ends it.

        A source that comes later replaces the earlier one: it is the worker's newer start.
        """
        self._sources[worker_id] = source

        def end() -> None:
            if self._sources.get(worker_id) is source:
                del self._sources[worker_id]

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when its worker no longer has it."""
        source = self._sources.get(rank.worker_id)
        batch = None if source is None else source.recover_range(rank, first, last)
        return None if batch is None else answer_for(rank, batch)

    async def recover_snapshot(
        self,
        rank: WorkerRank,
        *,
        blocks_max: int = BLOCKS_MAX,  # noqa: ARG002 - nothing is read here: it is in this process already
    ) -> KvSnapshot | None:
        """The rank's whole state as its worker knows it, or None when there is no one to ask."""
        source = self._sources.get(rank.worker_id)
        snapshot = None if source is None else source.recover_snapshot(rank)
        return None if snapshot is None else answer_for(rank, snapshot)
