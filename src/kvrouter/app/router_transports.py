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

from kvrouter.app.clusters import check_clusters, cordons_of_clusters, own_account, with_other_clusters
from kvrouter.app.nats import nats_connection, revealed
from kvrouter.app.telemetry_hooks import StreamHooks, foreign_on, malformed_on, refusals_on, troubles_on
from kvrouter.app.tls import Tls, tls_of
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventLane, LoadReport, WorkerCard
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
"""What distinguishes one start of a router from every other in the names of its consumers."""


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
                channel = f"the event transport {name}, which its card does not name"
                self._on_foreign(name, foreign(rank, channel, DropReason.OTHER_TRANSPORT))

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
                f"event_source: this router does not use {card.event_source.lane}, on which worker "
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


@dataclass(frozen=True, slots=True)
class RouterTransports:
    """The transports of a router. ``nats`` is there where something needs it."""

    discovery: Discovery
    cordons: CordonStore
    requests: RequestTransport
    events: EventSubscriber
    snapshots: SnapshotStore | None
    """Where the index is saved; None without JetStream."""

    new_sync: Callable[[], SyncTransport] | None
    """Makes the sync plane of one router; None without replica sync."""

    def replica_sync(self) -> ReplicaSync | None:
        """Return a router's part in replica sync; None without."""
        return None if self.new_sync is None else ReplicaSync(self.new_sync())


@asynccontextmanager
async def router_wires(
    settings: Settings, telemetry: Telemetry, *, http_port: int, static: Sequence[WorkerCard] = ()
) -> AsyncIterator[RouterTransports]:
    """Connect everything that the settings ask for; it is closed at the end.

    ``static`` are workers that were named by hand: with any, they are all that is there.
    Raises NatsUnreachable, or ConfigError that names the setting.
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
        subscribers = await _subscribers(settings, nats, telemetry, stack)
        stream: JetStreamSubscriber | None = None
        if nats is not None:
            stream = _stream(settings, nats, telemetry, stack, http_port=http_port)
            subscribers[EventLane.JETSTREAM] = stream
        new_sync: Callable[[], SyncTransport] | None = None
        if settings.router.replica_sync:
            new_sync = partial(
                NatsSyncTransport,
                wanted(nats),
                namespace=planes.namespace,
                token=token_of(planes),
                on_refused=refusals_on("sync", telemetry),
            )
        events = _all_events(subscribers, telemetry)
        yield RouterTransports(discovery, cordons, requests, events, stream, new_sync)


def settled(settings: Settings, *, kv_events: bool, replica_sync: bool = False) -> Settings:
    """Return the settings with the discovery that ``auto`` stands for. A directory of this host is logged:
    nobody on another host reads it.
    """
    planes = settings.planes.settled(kv_events=kv_events, replica_sync=replica_sync)
    if planes.discovery is DiscoveryBackend.FILE and settings.planes.discovery is DiscoveryBackend.AUTO:
        log_event(
            _log,
            Event.DISCOVERY_CHOSEN,
            address=str(planes.discovery_path),
            reason="--discovery auto: nothing else needs NATS",
        )
    return settings.model_copy(update={"planes": planes})


def nats_needs(settings: Settings, *, discovers: bool = True) -> list[str]:
    """Return what of this router cannot do without NATS; one that does not discover its workers has
    no discovery.
    """
    planes, router = settings.planes, settings.router
    lanes_of_nats = {EventPlaneKind.NATS, EventPlaneKind.JETSTREAM}
    if discovers and planes.discovery is DiscoveryBackend.KUBERNETES:
        lanes_of_nats.add(EventPlaneKind.AUTO)
    hears_nats = router.kv_events and planes.event_plane in lanes_of_nats
    needs = {
        "--discovery nats": discovers and planes.discovery is DiscoveryBackend.NATS,
        "--request-plane nats": planes.request_plane is RequestPlaneKind.NATS,
        f"KV events (--event-plane {planes.event_plane})": hears_nats and router.router_mode is RouterMode.KV,
        "--router-replica-sync": router.replica_sync,
    }
    return [what for what, is_needed in needs.items() if is_needed]


def _discovery(planes: PlaneSettings, nats: Client | None, telemetry: Telemetry) -> Discovery:
    """Discovery of a router: that of the settings, and of the other clusters where there are any."""
    own = make_discovery(planes, nats, telemetry)
    return with_other_clusters(planes, own, telemetry) if planes.clusters else own


def _cordons(
    planes: PlaneSettings, nats: Client | None, telemetry: Telemetry, stack: AsyncExitStack
) -> CordonStore:
    """Where the cordons are kept: with the cards."""
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
    """Discovery as the settings choose it; ``on_lost`` hears of own cards that lost their place."""
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
"""What makes discovery, and the store of cordons, of one backend."""


def _of_files(planes: PlaneSettings, _: Client | None) -> _Stores:
    directory = planes.discovery_path
    return partial(FileDiscovery, directory), partial(FileCordons, directory)


def _of_kubernetes(planes: PlaneSettings, _: Client | None) -> _Stores:
    user, pod = own_account(planes), None
    if planes.pod_name and planes.pod_uid:
        pod = OwnerPod(planes.pod_name, planes.pod_uid)
    return partial(KubernetesDiscovery, user, pod=pod), partial(KubernetesCordons, user)


def _of_nats(planes: PlaneSettings, nats: Client | None) -> _Stores:
    client, token, replicas = wanted(nats), token_of(planes), planes.nats_replicas
    discovery = partial(NatsDiscovery, client, token=token, replicas=replicas)
    return discovery, partial(NatsCordons, client, token=token, replicas=replicas)


_STORES: dict[DiscoveryBackend, Callable[[PlaneSettings, Client | None], _Stores]] = {
    DiscoveryBackend.FILE: _of_files,
    DiscoveryBackend.KUBERNETES: _of_kubernetes,
    DiscoveryBackend.NATS: _of_nats,
}


def stream_limits(planes: PlaneSettings) -> StreamLimits:
    """What a stream of KV events is made with."""
    return StreamLimits(replicas=planes.nats_replicas)


def token_of(planes: PlaneSettings) -> str:
    """What everything over NATS is sealed with; without a token the seal keeps only other planes out."""
    return revealed(planes.plane_token) or ""


def wanted(nats: Client | None) -> Client:
    """The connection that the settings need; a mistake of ours when it was not made."""
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
        wanted(nats),
        namespace=planes.namespace,
        token=token_of(planes),
        limits=limits,
        on_refused=on_refused,
    )


async def _subscribers(
    settings: Settings,
    nats: Client | None,
    telemetry: Telemetry,
    stack: AsyncExitStack,
) -> dict[EventLane, EventSubscriber]:
    """Every event transport without replay on which the fleet's workers may publish: the router hears all."""
    planes = settings.planes
    subscribers: dict[EventLane, EventSubscriber] = {}
    zmq = ZmqEventSubscriber(
        token=revealed(planes.plane_token),
        on_malformed=malformed_on("zmq", telemetry),
        on_foreign=foreign_on("zmq", telemetry),
    )
    stack.push_async_callback(zmq.close)
    subscribers[EventLane.ZMQ] = zmq
    if nats is None:
        return subscribers
    on_malformed = malformed_on("nats", telemetry)
    namespace, token = planes.namespace, token_of(planes)
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
    subscribers[EventLane.NATS] = core
    return subscribers


def _all_events(subscribers: Mapping[EventLane, EventSubscriber], telemetry: Telemetry) -> LaneSubscriber:
    foreign = {lane: foreign_on(lane.value, telemetry) for lane in subscribers}
    return LaneSubscriber(subscribers, on_foreign=lambda lane, error: foreign[lane](error))


def _stream(
    settings: Settings, nats: Client, telemetry: Telemetry, stack: AsyncExitStack, *, http_port: int
) -> JetStreamSubscriber:
    namespace, token = settings.planes.namespace, token_of(settings.planes)
    on_malformed = malformed_on("jetstream", telemetry)
    recovery = NatsRecovery(nats, namespace=namespace, token=token, on_malformed=on_malformed)
    stack.push_async_callback(recovery.close)
    stream = JetStreamSubscriber(
        nats,
        recovery,
        namespace=namespace,
        token=token,
        replica_name=replica_name(settings, http_port=http_port),
        limits=stream_limits(settings.planes),
        observer=StreamHooks(telemetry),
        resets_states=settings.router.reset_states,
    )
    stack.push_async_callback(stream.close)
    return stream


def replica_name(settings: Settings, *, http_port: int) -> str:
    """What this start of the router is called among its replicas: no two routers take each other's consumers,
    whatever their settings call them."""
    named = settings.router.replica_name
    if named is None:
        host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
        named = f"{host}-{http_port}"
    return f"{named}-{secrets.token_hex(START_BYTES)}"
