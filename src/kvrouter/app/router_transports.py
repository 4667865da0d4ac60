"""A router's transports, from the settings."""

import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from nats.aio.client import Client

from kvrouter.app.nats_connection import nats_connection, revealed
from kvrouter.app.other_clusters import check_clusters, cordons_of_clusters, own_account, with_other_clusters
from kvrouter.app.telemetry_hooks import StreamHooks, foreign_on, malformed_on, refusals_on, troubles_on
from kvrouter.app.tls import Tls, tls_of
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventTransport, LoadReport, WorkerCard
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.planes import DiscoveryBackend, EventPlaneKind, PlaneSettings, RequestPlaneKind
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.transports.events.jetstream import JetStreamSubscriber, StreamLimits
from kvrouter.transports.events.nats import NatsEventSubscriber
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import (
    BLOCKS_MAX,
    BatchSink,
    DropReason,
    EventSubscriber,
    ForeignRank,
    LoadSink,
    SnapshotStore,
    foreign,
)
from kvrouter.transports.events.zmq import ZmqEventSubscriber
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.file import FileCordons, FileDiscovery
from kvrouter.transports.records.kubernetes import KubernetesCordons, KubernetesDiscovery, OwnerPod
from kvrouter.transports.records.memory import MemoryCordons, StaticDiscovery
from kvrouter.transports.records.nats import NatsCordons, NatsDiscovery
from kvrouter.transports.records.port import CordonStore, Discovery, GoneSink
from kvrouter.transports.records.stored import StoredCordons
from kvrouter.transports.requests.http import HttpRequestTransport
from kvrouter.transports.requests.nats import NatsRequestTransport
from kvrouter.transports.requests.port import RequestTransport
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestTransport
from kvrouter.transports.sync.nats import NatsSyncTransport
from kvrouter.transports.sync.port import SyncTransport

_log = logging.getLogger("kvrouter.planes")  # as log lines name it

START_BYTES = 4
"""Random bytes that distinguish one start of a router from all others in the names of its consumers."""


class CombinedSubscriber:
    """Subscribes to a fleet of several event transports. Recovery requests go to the transport on which the
    worker is followed; events of the worker on another transport are dropped and ``on_foreign`` is called.
    """

    def __init__(
        self,
        subscribers: Mapping[EventTransport, EventSubscriber],
        *,
        on_foreign: Callable[[EventTransport, ForeignRank], None],
    ) -> None:
        self._subscribers = subscribers
        self._on_foreign = on_foreign
        self._subscriber_of: dict[WorkerId, EventSubscriber] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Subscribe on every event transport; return the function that ends it."""
        ends = [
            self._subscribe(name, subscriber, on_batch, on_load)
            for name, subscriber in self._subscribers.items()
        ]

        def end() -> None:
            for end_one in ends:
                end_one()

        return end

    def _subscribe(
        self, name: EventTransport, subscriber: EventSubscriber, on_batch: BatchSink, on_load: LoadSink
    ) -> Callable[[], None]:
        def batch_came(batch: KvBatch) -> None:
            """Deliver a batch of a worker followed on this transport; drop one of an unfollowed worker."""
            rank = batch.rank
            followed = self._subscriber_of.get(rank.worker_id)
            if followed is subscriber:
                on_batch(batch)
            elif followed is not None:
                channel = f"the event transport {name}, which its card does not name"
                self._on_foreign(name, foreign(rank, channel, DropReason.OTHER_TRANSPORT))

        def load_came(report: LoadReport) -> None:
            """Deliver a load once: both transports over NATS receive the loads of every worker."""
            if self._subscriber_of.get(report.rank.worker_id) is subscriber:
                on_load(report)

        return subscriber.subscribe(batch_came, load_came)

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Follow the worker on its event transport. Raises ConfigError where the router does not use that."""
        subscriber = self._subscribers.get(card.event_source.transport)
        if subscriber is None:
            raise ConfigError(
                f"event_source: this router does not use {card.event_source.transport}, on which worker "
                f"{card.worker_id} publishes: its cache stays unknown here",
                param="event_source",
            )
        end_there = subscriber.follow(card)
        self._subscriber_of[card.worker_id] = subscriber

        def end() -> None:
            end_there()
            if self._subscriber_of.get(card.worker_id) is subscriber:
                del self._subscriber_of[card.worker_id]

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive); None when it is not available."""
        subscriber = self._subscriber_of.get(rank.worker_id)
        return None if subscriber is None else await subscriber.recover_range(rank, first, last)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """The rank's full state; None when it is not available."""
        subscriber = self._subscriber_of.get(rank.worker_id)
        return None if subscriber is None else await subscriber.recover_snapshot(rank, blocks_max=blocks_max)


@dataclass(frozen=True, slots=True)
class RouterTransports:
    """The transports of a router."""

    discovery: Discovery
    cordons: CordonStore
    requests: RequestTransport
    events: EventSubscriber
    snapshots: SnapshotStore | None
    """The store of index snapshots; None without JetStream."""

    new_sync: Callable[[], SyncTransport] | None
    """Makes the sync transport of one router; None without replica sync."""

    def replica_sync(self) -> ReplicaSync | None:
        """Return replica sync for one router; None where it is off."""
        return None if self.new_sync is None else ReplicaSync(self.new_sync())


@asynccontextmanager
async def open_router_transports(
    settings: Settings, telemetry: Telemetry, *, http_port: int, static: Sequence[WorkerCard] = ()
) -> AsyncIterator[RouterTransports]:
    """Connect all transports that the settings require; they are closed at the end.

    ``static`` are workers named by hand, which replace discovery. Raises NatsUnreachable, or ConfigError that
    names the setting.
    """
    router = settings.router
    if not static:
        settings = settled(settings, kv_events=router.kv_events, replica_sync=router.replica_sync)
    planes = settings.planes
    check_clusters(planes, discovers=not static)
    tls = tls_of(planes)
    async with AsyncExitStack() as stack:
        nats: Client | None = None
        needs = nats_needs(settings, discovers=not static)
        if needs:
            nats = await stack.enter_async_context(
                nats_connection(planes, name=f"kvrouter-frontend-{http_port}", tls=tls.client, needs=needs)
            )
        discovery = StaticDiscovery(static) if static else _discovery(planes, nats, telemetry)
        stack.push_async_callback(discovery.close)
        cordons = MemoryCordons() if static else _cordons(planes, nats, telemetry, stack)
        requests = _requests(planes, nats, tls, telemetry)
        stack.push_async_callback(requests.close)
        events, stream = await _events(settings, nats, telemetry, stack, http_port=http_port)
        new_sync: Callable[[], SyncTransport] | None = None
        if settings.router.replica_sync:
            new_sync = partial(
                NatsSyncTransport,
                required_nats(nats),
                namespace=planes.namespace,
                token=token_of(planes),
                on_refused=refusals_on("sync", telemetry),
            )
        yield RouterTransports(discovery, cordons, requests, events, stream, new_sync)


def settled(settings: Settings, *, kv_events: bool, replica_sync: bool = False) -> Settings:
    """Return the settings with the backend that ``--discovery auto`` resolves to. A directory that nobody
    named is warned of: other hosts and containers cannot read it.
    """
    planes = settings.planes.settled(kv_events=kv_events, replica_sync=replica_sync)
    if planes.discovery is DiscoveryBackend.FILE and planes.discovery_dir is None:
        is_auto = settings.planes.discovery is DiscoveryBackend.AUTO
        why = "--discovery auto: nothing else needs NATS; " if is_auto else ""
        log_event(
            _log,
            Event.DISCOVERY_CHOSEN,
            address=str(planes.discovery_path),
            reason=f"{why}two hosts or containers "
            "never meet here: name a folder that they share by --discovery-dir, or --discovery nats",
        )
    return settings.model_copy(update={"planes": planes})


def nats_needs(settings: Settings, *, discovers: bool = True) -> list[str]:
    """Return the features of this router that need NATS; without ``discovers`` discovery is none of them."""
    planes, router = settings.planes, settings.router
    nats_kinds = {EventPlaneKind.NATS, EventPlaneKind.JETSTREAM}
    if discovers and planes.discovery is DiscoveryBackend.KUBERNETES:
        nats_kinds.add(EventPlaneKind.AUTO)
    needs_nats_events = router.kv_events and planes.event_plane in nats_kinds
    needs = {
        "--discovery nats": discovers and planes.discovery is DiscoveryBackend.NATS,
        "--request-plane nats": planes.request_plane is RequestPlaneKind.NATS,
        f"KV events (--event-plane {planes.event_plane})": needs_nats_events
        and router.router_mode is RouterMode.KV,
        "--router-replica-sync": router.replica_sync,
    }
    return [what for what, is_needed in needs.items() if is_needed]


def _discovery(planes: PlaneSettings, nats: Client | None, telemetry: Telemetry) -> Discovery:
    """The router's discovery: that of the settings, with the other clusters where any are configured."""
    own = make_discovery(planes, nats, telemetry)
    return with_other_clusters(planes, own, telemetry) if planes.clusters else own


def _cordons(
    planes: PlaneSettings, nats: Client | None, telemetry: Telemetry, stack: AsyncExitStack
) -> CordonStore:
    """The cordon store, in the discovery backend."""
    _, cordons = _STORES[planes.discovery](planes, nats)
    own = cordons(namespace=planes.namespace, on_refused=_refusals(telemetry))
    store, others = cordons_of_clusters(planes, own, telemetry) if planes.clusters else (own, [])
    for each in (own, *others):
        stack.push_async_callback(each.close)
    return store


def make_discovery(
    planes: PlaneSettings,
    nats: Client | None,
    telemetry: Telemetry | None = None,
    *,
    on_lost: GoneSink | None = None,
) -> Discovery:
    """Discovery as the settings choose it; ``on_lost`` is called when a newer start replaces an own card."""
    discovery, _ = _STORES[planes.discovery](planes, nats)
    return discovery(
        namespace=planes.namespace,
        lease_s=planes.card_lease_s,
        on_lost=on_lost,
        on_trouble=troubles_on("discovery"),
        on_refused=_refusals(telemetry),
    )


def _refusals(telemetry: Telemetry | None) -> TroubleSink:
    refuse = refusals_on("discovery", telemetry)
    return lambda what, why: refuse(f"{what}: {why}")


_Stores = tuple[Callable[..., Discovery], Callable[..., StoredCordons[Any]]]
"""Makers of the discovery and of the cordon store of one backend."""


def _of_files(planes: PlaneSettings, _: Client | None) -> _Stores:
    directory = planes.discovery_path
    return partial(FileDiscovery, directory), partial(FileCordons, directory)


def _of_kubernetes(planes: PlaneSettings, _: Client | None) -> _Stores:
    user, pod = own_account(planes), None
    if planes.pod_name and planes.pod_uid:
        pod = OwnerPod(planes.pod_name, planes.pod_uid)
    return partial(KubernetesDiscovery, user, pod=pod), partial(KubernetesCordons, user)


def _of_nats(planes: PlaneSettings, nats: Client | None) -> _Stores:
    client, token, replicas = required_nats(nats), token_of(planes), planes.nats_replicas
    discovery = partial(NatsDiscovery, client, token=token, replicas=replicas)
    return discovery, partial(NatsCordons, client, token=token, replicas=replicas)


_STORES: dict[DiscoveryBackend, Callable[[PlaneSettings, Client | None], _Stores]] = {
    DiscoveryBackend.FILE: _of_files,
    DiscoveryBackend.KUBERNETES: _of_kubernetes,
    DiscoveryBackend.NATS: _of_nats,
}


def stream_limits(planes: PlaneSettings) -> StreamLimits:
    """The limits with which a stream of KV events is created."""
    return StreamLimits(replicas=planes.nats_replicas)


def token_of(planes: PlaneSettings) -> str:
    """The token that authenticates messages over NATS; an empty one only separates namespaces."""
    return revealed(planes.plane_token) or ""


def required_nats(nats: Client | None) -> Client:
    """The NATS connection; RuntimeError, an internal error, when it was not made."""
    if nats is None:
        raise RuntimeError("these settings need NATS, and it was not connected")
    return nats


def _requests(planes: PlaneSettings, nats: Client | None, tls: Tls, telemetry: Telemetry) -> RequestTransport:
    token = revealed(planes.plane_token)
    on_refused = refusals_on(planes.request_plane.value, telemetry)
    limits = RouterLimits(
        open_timeout_s=planes.open_timeout_s,
        dead_after_s=planes.dead_after_s,
        heartbeat_s=planes.dead_after_s / (6 if planes.request_plane is RequestPlaneKind.NATS else 3),
    )
    if planes.request_plane is RequestPlaneKind.TCP:
        return TcpRequestTransport(token=token, ssl=tls.client, limits=limits, on_refused=on_refused)
    if planes.request_plane is RequestPlaneKind.HTTP:
        return HttpRequestTransport(token=token or "", ssl=tls.client, limits=limits, on_refused=on_refused)
    return NatsRequestTransport(
        required_nats(nats),
        namespace=planes.namespace,
        token=token_of(planes),
        limits=limits,
        on_refused=on_refused,
    )


async def _events(
    settings: Settings, nats: Client | None, telemetry: Telemetry, stack: AsyncExitStack, *, http_port: int
) -> tuple[CombinedSubscriber, JetStreamSubscriber | None]:
    """A subscriber on every event transport, since workers may publish on any of them; and the one among
    them that replays, None without NATS.
    """
    planes = settings.planes
    subscribers: dict[EventTransport, EventSubscriber] = {}
    stream: JetStreamSubscriber | None = None
    zmq = ZmqEventSubscriber(
        token=revealed(planes.plane_token),
        on_malformed=malformed_on("zmq", telemetry),
        on_foreign=foreign_on("zmq", telemetry),
    )
    stack.push_async_callback(zmq.close)
    subscribers[EventTransport.ZMQ] = zmq
    if nats is not None:
        namespace, token = planes.namespace, token_of(planes)
        on_malformed = malformed_on("nats", telemetry)
        recovery = NatsRecovery(nats, namespace=namespace, token=token, on_malformed=on_malformed)
        stack.push_async_callback(recovery.close)
        core = NatsEventSubscriber(
            nats,
            recovery,
            namespace=namespace,
            token=token,
            on_malformed=on_malformed,
            on_foreign=foreign_on("nats", telemetry),
        )
        stack.push_async_callback(core.close)
        await core.start()
        subscribers[EventTransport.NATS] = core
        on_malformed = malformed_on("jetstream", telemetry)
        recovery = NatsRecovery(nats, namespace=namespace, token=token, on_malformed=on_malformed)
        stack.push_async_callback(recovery.close)
        stream = JetStreamSubscriber(
            nats,
            recovery,
            namespace=namespace,
            token=token,
            replica_name=replica_name(settings, http_port=http_port),
            limits=stream_limits(planes),
            observer=StreamHooks(telemetry),
            resets_states=settings.router.reset_states,
        )
        stack.push_async_callback(stream.close)
        subscribers[EventTransport.JETSTREAM] = stream
    foreign = {name: foreign_on(name.value, telemetry) for name in subscribers}
    return CombinedSubscriber(subscribers, on_foreign=lambda name, error: foreign[name](error)), stream


def replica_name(settings: Settings, *, http_port: int) -> str:
    """The unique name of this start of the router, so that no two routers share consumers."""
    named = settings.router.replica_name
    if named is None:
        host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
        named = f"{host}-{http_port}"
    return f"{named}-{secrets.token_hex(START_BYTES)}"
