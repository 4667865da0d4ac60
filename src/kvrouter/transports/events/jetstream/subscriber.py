"""Subscribes to all components: one stream subscriber for each."""

from collections.abc import Callable, Sequence
from functools import partial

from nats.aio.client import Client

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.transports.events.jetstream.consumer import HEARTBEAT_S
from kvrouter.transports.events.jetstream.snapshot_writer import LEASE_S, SnapshotWriter
from kvrouter.transports.events.jetstream.stream import (
    CLIENT_ERRORS,
    LaneNames,
    LaneObserver,
    StreamLimits,
    Unobserved,
)
from kvrouter.transports.events.jetstream.stream_subscriber import ComponentLane, LaneParts
from kvrouter.transports.events.port import (
    BLOCKS_MAX,
    BatchSink,
    DropReason,
    LoadSink,
    PendingSnapshot,
    RecoveryClient,
    SnapshotFailed,
    foreign,
)
from kvrouter.transports.events.subjects import message_auth_of
from kvrouter.transports.nats_client import reason

COMPONENTS_MAX = 64
"""How many components' streams one router hears."""


class JetStreamSubscriber:
    """Hears the streams of the components whose workers are followed; use it from one event loop.

    ``replica_name`` must be this router's alone: its consumers on the server carry it. ``recovery`` asks a
    worker, for what the stream does not hold. ``resets_states``: each component's stream and snapshots are
    cleared once, before it is heard; other replicas lose what they relied on. A server that is silent for
    three times ``heartbeat_s`` is taken for dead; a replica that takes a snapshot for dead after ``lease_s``.
    """

    def __init__(
        self,
        client: Client,
        recovery: RecoveryClient,
        *,
        namespace: str,
        token: str,
        replica_name: str,
        limits: StreamLimits | None = None,
        observer: LaneObserver | None = None,
        resets_states: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._client = client
        self._recovery = recovery
        self._namespace = namespace
        self._seal = message_auth_of(token, namespace)
        self._replica_name = replica_name
        self._limits = limits or StreamLimits()
        self._observer = observer or Unobserved()
        self._resets_states = resets_states
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._sinks: dict[object, tuple[BatchSink, LoadSink]] = {}
        self._lanes: dict[str, ComponentLane] = {}
        self._takers: dict[str, SnapshotWriter] = {}
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
        """The batch of ids ``first`` to ``last``, of the worker; None once the stream has brought it."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None:
            return await self._recovery.recover_range(rank, first, last)
        return await lane.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's state: at its first ask what was stored, at any other what its worker says."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None:
            return await self._recovery.recover_snapshot(rank, blocks_max=blocks_max)
        return await lane.recover_snapshot(rank, blocks_max=blocks_max)

    async def close(self) -> None:
        """Hear nothing any more; idempotent."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        self._takers.clear()
        self._lane_of.clear()
        for lane in lanes:
            await lane.close()

    # Snapshots

    async def overdue(self, *, messages_max: int) -> Sequence[str]:
        """The components whose streams hold more than ``messages_max`` messages; raise SnapshotFailed."""
        try:
            return [
                component
                for component, lane in list(self._lanes.items())
                if lane.made and (await lane.stream.read()).messages > messages_max
            ]
        except CLIENT_ERRORS as error:
            raise SnapshotFailed(reason(error)) from error

    async def take(self, component: str) -> PendingSnapshot | None:
        """Begin a snapshot of the component; None while another replica does. Raises SnapshotFailed."""
        taker = self._takers.get(component)
        if taker is None:
            lane = self._lanes.get(component)
            if lane is None:
                return None
            taker = self._takers[component] = SnapshotWriter(
                lane,
                replica_name=self._replica_name,
                name=lambda: self._client.new_inbox().rpartition(".")[2],
                lease_s=self._lease_s,
            )
        return await taker.take()

    # The sinks

    def _open(self, component: str) -> ComponentLane:
        return ComponentLane(
            LaneParts(
                client=self._client,
                recovery=self._recovery,
                names=LaneNames(self._namespace, component),
                seal=self._seal,
                replica_name=self._replica_name,
                limits=self._limits,
                observer=self._observer,
                on_batch=partial(self._hand, component),
                on_load=partial(self._hand_load, component),
                heartbeat_s=self._heartbeat_s,
                resets=self._resets_states,
            )
        )

    def _drops(self, component: str, rank: WorkerRank) -> bool:
        """Whether a message is dropped and reported because its rank's worker is of another component."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None or lane.names.component == component:
            return False
        self._observer.spoke_for_another(foreign(rank, f"component {component}", DropReason.OTHER_COMPONENT))
        return True

    def _hand(self, component: str, batch: KvBatch) -> None:
        if self._drops(component, batch.rank):
            return
        for on_batch, _ in tuple(self._sinks.values()):
            on_batch(batch)

    def _hand_load(self, component: str, report: LoadReport) -> None:
        if self._drops(component, report.rank):
            return
        for _, on_load in tuple(self._sinks.values()):
            on_load(report)
