"""Subscribes to the streams of all components, one subscriber for each."""

from collections.abc import Callable, Sequence
from functools import partial

from nats.aio.client import Client

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.transports.events.jetstream.consumer import HEARTBEAT_S
from kvrouter.transports.events.jetstream.snapshot_writer import LEASE_S, SnapshotWriter
from kvrouter.transports.events.jetstream.stream import EventTransportObserver, StreamLimits
from kvrouter.transports.events.jetstream.stream_subscriber import ComponentSubscriber, SubscriberContext
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
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason

COMPONENTS_MAX = 64
"""Components that one router subscribes to."""


class JetStreamSubscriber(EventSinks):
    """Subscribes to the streams of the components of followed workers, on one event loop.

    ``replica_name`` must be unique to this router: it names its consumers on the server. ``recovery`` asks a
    worker for events that the stream does not hold. With ``resets_states`` each component's stream and
    snapshots are cleared once, before the first subscription; other replicas lose them too. A server that is
    silent for three times ``heartbeat_s`` is dead; a replica that takes a snapshot is dead after ``lease_s``.
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
        observer: EventTransportObserver,
        resets_states: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__()
        self._parts = SubscriberContext(
            client=client,
            recovery=recovery,
            namespace=namespace,
            auth=message_auth_of(token, namespace),
            replica_name=replica_name,
            limits=limits or StreamLimits(),
            observer=observer,
            heartbeat_s=heartbeat_s,
            resets=resets_states,
        )
        self._lease_s = lease_s
        self._subscribers: dict[str, ComponentSubscriber] = {}
        self._writers: dict[str, SnapshotWriter] = {}
        self._subscriber_of: dict[WorkerId, ComponentSubscriber] = {}

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Follow the worker in its component's stream. Follow a card before its ranks are recovered."""
        subscriber = self._subscribers.get(card.component)
        if subscriber is None:
            if len(self._subscribers) >= COMPONENTS_MAX:
                self._parts.observer.disturbed(card.component, f"not heard: {COMPONENTS_MAX} components are")
                return lambda: None
            subscriber = self._subscribers[card.component] = ComponentSubscriber(
                self._parts,
                card.component,
                on_batch=partial(self._batch_came, card.component),
                on_load=partial(self._load_came, card.component),
            )
        worker_id, epoch = card.worker_id, card.incarnation
        old = self._subscriber_of.get(worker_id)
        if old is not None and old is not subscriber:
            old.forget(worker_id)
        self._subscriber_of[worker_id] = subscriber
        subscriber.follow(worker_id, epoch)

        def end() -> None:
            if subscriber.unfollow(worker_id, epoch) and self._subscriber_of.get(worker_id) is subscriber:
                del self._subscriber_of[worker_id]

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Return the events ``first`` to ``last`` from the worker; None once the stream delivered them."""
        subscriber = self._subscriber_of.get(rank.worker_id)
        if subscriber is None:
            return await self._parts.recovery.recover_range(rank, first, last)
        return await subscriber.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """Return the rank's state: from the snapshot at the first call, from its worker at later ones."""
        subscriber = self._subscriber_of.get(rank.worker_id)
        if subscriber is None:
            return await self._parts.recovery.recover_snapshot(rank, blocks_max=blocks_max)
        return await subscriber.recover_snapshot(rank, blocks_max=blocks_max)

    async def close(self) -> None:
        """Close all subscribers; idempotent."""
        subscribers = list(self._subscribers.values())
        self._subscribers.clear()
        self._writers.clear()
        self._subscriber_of.clear()
        for subscriber in subscribers:
            await subscriber.close()

    # Snapshots

    async def overdue(self, *, messages_max: int) -> Sequence[str]:
        """Return the components whose streams exceed ``messages_max`` messages; raise SnapshotFailed."""
        try:
            return [
                component
                for component, subscriber in list(self._subscribers.items())
                if subscriber.created and (await subscriber.stream.read()).messages > messages_max
            ]
        except CLIENT_ERRORS as error:
            raise SnapshotFailed(reason(error)) from error

    async def take(self, component: str) -> PendingSnapshot | None:
        """Begin a snapshot of the component; None while another replica takes one. Raises SnapshotFailed."""
        writer = self._writers.get(component)
        if writer is None:
            subscriber = self._subscribers.get(component)
            if subscriber is None:
                return None
            writer = self._writers[component] = SnapshotWriter(
                subscriber,
                replica_name=self._parts.replica_name,
                name=lambda: self._parts.client.new_inbox().rpartition(".")[2],
                lease_s=self._lease_s,
            )
        return await writer.take()

    # The sinks

    def _drops(self, component: str, rank: WorkerRank) -> bool:
        """Drop and report a message about a rank of another component's worker; return whether it was one."""
        subscriber = self._subscriber_of.get(rank.worker_id)
        if subscriber is None or subscriber.names.component == component:
            return False
        self._parts.observer.spoke_for_another(
            foreign(rank, f"component {component}", DropReason.OTHER_COMPONENT)
        )
        return True

    def _batch_came(self, component: str, batch: KvBatch) -> None:
        if not self._drops(component, batch.rank):
            self._deliver(batch)

    def _load_came(self, component: str, report: LoadReport) -> None:
        if not self._drops(component, report.rank):
            self._deliver_load(report)
