"""A router's end of the lane: one stream for each component whose workers publish there."""

from collections.abc import Callable

from nats.aio.client import Client

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.planes.events.jetstream.lane import ComponentLane, LaneParts
from kvrouter.planes.events.jetstream.words import LaneNames, LaneObserver, StreamLimits, Unobserved
from kvrouter.planes.events.port import BatchSink, LoadSink, RecoveryClient

COMPONENTS_MAX = 64
"""How many components' streams one router hears."""


class JetStreamSubscriber:
    """Hears the streams of the components whose workers are followed; use it from one event loop.

    ``replica_name`` must be this router's alone: its consumers on the server carry it. ``recovery`` asks a
    worker, for what the stream can't tell. ``resets_states``: each component's stream and snapshots are
    cleared once, before it is heard; other replicas lose what they relied on.
    """

    def __init__(
        self,
        client: Client,
        recovery: RecoveryClient,
        *,
        namespace: str,
        replica_name: str,
        limits: StreamLimits | None = None,
        observer: LaneObserver | None = None,
        resets_states: bool = False,
    ) -> None:
        self._client = client
        self._recovery = recovery
        self._namespace = namespace
        self._replica_name = replica_name
        self._limits = limits or StreamLimits()
        self._observer = observer or Unobserved()
        self._resets_states = resets_states
        self._sinks: dict[object, tuple[BatchSink, LoadSink]] = {}
        self._lanes: dict[str, ComponentLane] = {}
        self._lane_of: dict[WorkerId, ComponentLane] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""
        key = object()
        self._sinks[key] = (on_batch, on_load)

        def end() -> None:
            self._sinks.pop(key, None)

        return end

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Listen to the worker's component. Follow a card before its ranks' state is asked for."""
        lane = self._lanes.get(card.component)
        if lane is None:
            if len(self._lanes) >= COMPONENTS_MAX:
                self._observer.disturbed(card.component, f"not heard: {COMPONENTS_MAX} components are")
                return lambda: None
            lane = self._lanes[card.component] = self._open(card.component)
        worker_id, epoch = card.worker_id, card.incarnation
        old = self._lane_of.get(worker_id)
        if old is not None and old is not lane:
            old.forget(worker_id)
        self._lane_of[worker_id] = lane
        lane.follow(worker_id, epoch)

        def end() -> None:
            if lane.unfollow(worker_id, epoch) and self._lane_of.get(worker_id) is lane:
                del self._lane_of[worker_id]

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Ask the worker for the batch of ids ``first`` to ``last`` (inclusive)."""
        return await self._recovery.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's state: at its first ask what was stored, at any other what its worker says."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None:
            return await self._recovery.recover_snapshot(rank)
        return await lane.recover_snapshot(rank)

    async def close(self) -> None:
        """Hear nothing any more; idempotent."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        self._lane_of.clear()
        for lane in lanes:
            await lane.close()

    # The sinks

    def _open(self, component: str) -> ComponentLane:
        return ComponentLane(
            LaneParts(
                client=self._client,
                recovery=self._recovery,
                names=LaneNames(self._namespace, component),
                replica_name=self._replica_name,
                limits=self._limits,
                observer=self._observer,
                on_batch=self._hand,
                on_load=self._hand_load,
                resets=self._resets_states,
            )
        )

    def _hand(self, batch: KvBatch) -> None:
        for on_batch, _ in tuple(self._sinks.values()):
            on_batch(batch)

    def _hand_load(self, report: LoadReport) -> None:
        for _, on_load in tuple(self._sinks.values()):
            on_load(report)
