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
    LaneObserver,
    StreamLimits,
)
from kvrouter.transports.events.jetstream.stream_subscriber import ComponentLane, LaneParts
from kvrouter.transports.events.port import (
    BLOCKS_MAX,
    DropReason,
    PendingSnapshot,
    RecoveryClient,
    SnapshotFailed,
    foreign,
)
from kvrouter.transports.events.sinks import EventSinks
from kvrouter.transports.events.subjects import message_auth_of
from kvrouter.transports.nats_client import reason

COMPONENTS_MAX = 64
"""How many components' streams one router hears."""


class JetStreamSubscriber(EventSinks):
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
        observer: LaneObserver,
        resets_states: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__()
        self._parts = LaneParts(
            client=client,
            recovery=recovery,
            namespace=namespace,
            seal=message_auth_of(token, namespace),
            replica_name=replica_name,
            limits=limits or StreamLimits(),
            observer=observer,
            heartbeat_s=heartbeat_s,
            resets=resets_states,
        )
        self._lease_s = lease_s
        self._lanes: dict[str, ComponentLane] = {}
        self._takers: dict[str, SnapshotWriter] = {}
        self._lane_of: dict[WorkerId, ComponentLane] = {}

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Listen to the worker's component. Follow a card before its ranks' state is asked for."""
        lane = self._lanes.get(card.component)
        if lane is None:
            if len(self._lanes) >= COMPONENTS_MAX:
                self._parts.observer.disturbed(card.component, f"not heard: {COMPONENTS_MAX} components are")
                return lambda: None
            lane = self._lanes[card.component] = ComponentLane(
                self._parts,
                card.component,
                on_batch=partial(self._batch_came, card.component),
                on_load=partial(self._load_came, card.component),
            )
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
            return await self._parts.recovery.recover_range(rank, first, last)
        return await lane.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's state: at its first ask what was stored, at any other what its worker says."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None:
            return await self._parts.recovery.recover_snapshot(rank, blocks_max=blocks_max)
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
                replica_name=self._parts.replica_name,
                name=lambda: self._parts.client.new_inbox().rpartition(".")[2],
                lease_s=self._lease_s,
            )
        return await taker.take()

    # The sinks

    def _drops(self, component: str, rank: WorkerRank) -> bool:
        """Whether a message is dropped and reported because its rank's worker is of another component."""
        lane = self._lane_of.get(rank.worker_id)
        if lane is None or lane.names.component == component:
            return False
        self._parts.observer.spoke_for_another(
            foreign(rank, f"component {component}", DropReason.OTHER_COMPONENT)
        )
        return True

    def _batch_came(self, component: str, batch: KvBatch) -> None:
        if not self._drops(component, batch.rank):
            self._hand(batch)

    def _load_came(self, component: str, report: LoadReport) -> None:
        if not self._drops(component, report.rank):
            self._hand_load(report)
