"""An event subscriber over several transports: each worker on the one that its card names."""

from collections.abc import Callable, Mapping

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventLane, LoadReport, WorkerCard
from kvrouter.transports.events.port import (
    BLOCKS_MAX,
    BatchSink,
    DropReason,
    EventSubscriber,
    ForeignRank,
    LoadSink,
    foreign,
)


class LaneSubscriber:
    """Hears a mixed fleet. A question goes to the event transport on which the worker is followed; what
    another transport brings of that worker is dropped, and ``on_foreign`` is called.
    """

    def __init__(
        self,
        lanes: Mapping[EventLane, EventSubscriber],
        *,
        on_foreign: Callable[[EventLane, ForeignRank], None],
    ) -> None:
        self._lanes = lanes
        self._on_foreign = on_foreign
        self._lane_of: dict[WorkerId, EventSubscriber] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver what comes on every event transport; return the function that ends it."""
        ends = [self._subscribe(name, lane, on_batch, on_load) for name, lane in self._lanes.items()]

        def end() -> None:
            for end_one in ends:
                end_one()

        return end

    def _subscribe(
        self, name: EventLane, lane: EventSubscriber, on_batch: BatchSink, on_load: LoadSink
    ) -> Callable[[], None]:
        def batch_came(batch: KvBatch) -> None:
            """Deliver a batch of a worker followed on this transport; one followed nowhere has none."""
            rank = batch.rank
            followed = self._lane_of.get(rank.worker_id)
            if followed is lane:
                on_batch(batch)
            elif followed is not None:
                channel = f"the {name} lane, which its card does not name"
                self._on_foreign(name, foreign(rank, channel, DropReason.OTHER_LANE))

        def load_came(report: LoadReport) -> None:
            """Deliver a load once: on NATS both transports hear the loads of every worker."""
            if self._lane_of.get(report.rank.worker_id) is lane:
                on_load(report)

        return lane.subscribe(batch_came, load_came)

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Listen to this worker on its event transport. Raises ConfigError for one that this router does not
        hear.
        """
        lane = self._lanes.get(card.event_source.lane)
        if lane is None:
            raise ConfigError(
                f"event_source: this router does not hear the {card.event_source.lane} lane on which worker "
                f"{card.worker_id} publishes: its cache stays unknown here",
                param="event_source",
            )
        end_there = lane.follow(card)
        self._lane_of[card.worker_id] = lane

        def end() -> None:
            end_there()
            if self._lane_of.get(card.worker_id) is lane:
                del self._lane_of[card.worker_id]

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive), or None when there is no one to ask."""
        lane = self._lane_of.get(rank.worker_id)
        return None if lane is None else await lane.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's whole state, or None when there is no one to ask."""
        lane = self._lane_of.get(rank.worker_id)
        return None if lane is None else await lane.recover_snapshot(rank, blocks_max=blocks_max)
