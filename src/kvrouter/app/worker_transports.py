"""A worker's transports, from the settings."""

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Protocol

from nats.aio.client import Client

from kvrouter.app.lifetime import share_descriptors
from kvrouter.app.nats_connection import nats_connection, revealed
from kvrouter.app.router_transports import make_discovery, required_nats, settled, stream_limits, token_of
from kvrouter.app.telemetry_hooks import StreamHooks, drops_on, refusals_on
from kvrouter.app.tls import Tls, advertised, tls_of
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import EventTransport
from kvrouter.settings.planes import (
    DiscoveryBackend,
    EventPlaneKind,
    PlaneSettings,
    RequestPlaneKind,
    refuse_clusters,
)
from kvrouter.settings.tree import Settings
from kvrouter.transports.events.jetstream import JetStreamPublisher
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.events.nats import NatsEventPublisher
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventPublisher, RecoveryServer
from kvrouter.transports.events.zmq import ZmqEventPublisher
from kvrouter.transports.listener import ROUTERS_MAX
from kvrouter.transports.records.memory import StaticDiscovery
from kvrouter.transports.records.port import GoneSink
from kvrouter.transports.requests.http import CONNECTIONS_MAX, HttpRequestAcceptor
from kvrouter.transports.requests.nats import NatsRequestAcceptor
from kvrouter.transports.requests.port import RequestAcceptor
from kvrouter.transports.requests.tcp import TcpRequestAcceptor
from kvrouter.transports.requests.worker_session import WorkerLimits
from kvrouter.worker import WorkerTransports

PORT_MAX = 65_535

ZMQ_PORTS = 2
"""How many ports above ``--listen-port`` KV events over ZeroMQ take."""

_HAS_NO_PORT = {errno.EADDRINUSE: "is taken", errno.EACCES: "is not for this user"}


class ListeningAcceptor(RequestAcceptor, Protocol):
    """The worker's end of a request transport, which listens."""

    async def start(self) -> None:
        """Start to listen."""

    async def close(self) -> None:
        """Stop listening; open streams break."""


@asynccontextmanager
async def open_worker_transports(
    settings: Settings,
    *,
    component: str,
    has_local_indexer: bool,
    publishes_kv_events: bool,
    is_static: bool = False,
    on_lost: GoneSink | None = None,
) -> AsyncIterator[WorkerTransports]:
    """Connect all transports that the settings require; they are closed at the end.

    ``on_lost`` is called when a newer start of the same id replaces the worker's card. With ``is_static`` the
    worker takes requests, but registers neither itself nor its cache. Raises NatsUnreachable, or ConfigError
    that names the setting.
    """
    settings = settled(settings, kv_events=True)
    planes = settings.planes
    refuse_clusters(planes, "a worker announces itself in its own cluster alone")
    tls = tls_of(planes)
    transport = event_transport_of(
        planes, has_local_indexer=has_local_indexer, publishes_kv_events=publishes_kv_events
    )
    if not is_static:
        _check_ports(planes, transport)
    async with AsyncExitStack() as stack:
        nats: Client | None = None
        needs = _nats_needs(planes, transport, is_static=is_static)
        if needs:
            nats = await stack.enter_async_context(
                nats_connection(planes, name=f"kvrouter-worker-{component}", tls=tls.client, needs=needs)
            )
        discovery = StaticDiscovery() if is_static else make_discovery(planes, nats, on_lost=on_lost)
        stack.push_async_callback(discovery.close)
        listener = _listener(settings, nats, tls)
        with _explained(planes, f"port {planes.listen_port}"):
            await listener.start()
        stack.push_async_callback(listener.close)
        if is_static:
            unused_events = MemoryEventTransport()
            yield WorkerTransports(discovery, listener, unused_events, unused_events)
            return
        events, recovery = await _events(settings, nats, transport, component, stack)
        yield WorkerTransports(discovery, listener, events, recovery)


def event_transport_of(
    planes: PlaneSettings, *, has_local_indexer: bool, publishes_kv_events: bool = True
) -> EventTransport:
    """The event transport on which a worker publishes; ``auto`` is resolved by the specification's rule.

    A worker without KV events publishes only its load, over ZeroMQ where nothing else needs NATS.
    """
    on_tcp = planes.request_plane is not RequestPlaneKind.NATS
    needs_none = planes.discovery is DiscoveryBackend.KUBERNETES and on_tcp
    if not publishes_kv_events and (needs_none or planes.discovery is DiscoveryBackend.FILE):
        return EventTransport.ZMQ
    if planes.event_plane is EventPlaneKind.AUTO:
        if planes.discovery is DiscoveryBackend.FILE:
            return EventTransport.ZMQ
        return EventTransport.NATS if has_local_indexer else EventTransport.JETSTREAM
    return EventTransport(planes.event_plane.value)


def _nats_needs(planes: PlaneSettings, transport: EventTransport, *, is_static: bool) -> list[str]:
    """The features of a worker that need NATS; a static one does not register."""
    needs = {
        "--discovery nats": planes.discovery is DiscoveryBackend.NATS and not is_static,
        "--request-plane nats": planes.request_plane is RequestPlaneKind.NATS,
        f"KV events and loads (--event-plane {planes.event_plane})": transport is not EventTransport.ZMQ
        and not is_static,
    }
    return [what for what, is_needed in needs.items() if is_needed]


def _check_ports(planes: PlaneSettings, transport: EventTransport) -> None:
    """Check that the ports above the configured one exist. Raises ConfigError."""
    highest = PORT_MAX - ZMQ_PORTS
    if transport is EventTransport.ZMQ and planes.listen_port > highest:
        raise ConfigError(
            f"--listen-port: at most {highest}, not {planes.listen_port}: "
            f"KV events over ZeroMQ take the {ZMQ_PORTS} ports above it",
            param="listen_port",
        )


@contextmanager
def _explained(planes: PlaneSettings, ports: str) -> Iterator[None]:
    """Add to an error about an unavailable address the flag that chooses another."""
    try:
        yield
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        why = _HAS_NO_PORT.get(cause.errno or 0)
        if why is None:
            raise ConfigError(
                f"{error.message}: choose another address with --listen-host", param="listen_host"
            ) from error
        raise ConfigError(
            f"{ports} on {planes.listen_host} {why}: choose another with --listen-port", param="listen_port"
        ) from error


def _listener(settings: Settings, nats: Client | None, tls: Tls) -> ListeningAcceptor:
    planes = settings.planes
    on_refused = refusals_on(planes.request_plane.value)
    if planes.request_plane is RequestPlaneKind.NATS:
        return NatsRequestAcceptor(
            required_nats(nats),
            namespace=planes.namespace,
            token=token_of(planes),
            limits=WorkerLimits(heartbeat_s=planes.dead_after_s / 6, dead_after_s=planes.dead_after_s),
            on_refused=on_refused,
        )
    is_tcp = planes.request_plane is RequestPlaneKind.TCP
    shared = share_descriptors(ROUTERS_MAX if is_tcp else CONNECTIONS_MAX)
    listening = TcpRequestAcceptor if is_tcp else HttpRequestAcceptor
    return listening(
        planes.listen_host,
        planes.listen_port,
        token=revealed(planes.plane_token),
        ssl=tls.server,
        advertise_host=advertised(settings),
        limits=WorkerLimits(
            connections_max=shared.connections_max,
            unauthenticated_max=planes.hello_connections_max,
            hello_within_s=planes.hello_within_s,
            descriptors_max=shared.numbers_max,
            heartbeat_s=planes.dead_after_s / 3,
            dead_after_s=planes.dead_after_s,
        ),
        on_refused=on_refused,
    )


async def _events(
    settings: Settings, nats: Client | None, transport: EventTransport, component: str, stack: AsyncExitStack
) -> tuple[EventPublisher, RecoveryServer]:
    planes = settings.planes
    on_malformed = refusals_on(transport.value)
    if transport is EventTransport.ZMQ:
        port = planes.listen_port
        with _explained(planes, f"port {port + 1} or {port + 2}, for KV events over ZeroMQ,"):
            zmq = ZmqEventPublisher(
                planes.listen_host,
                port and port + 1,
                recovery_port=port and port + 2,
                advertise_host=advertised(settings),
                token=revealed(planes.plane_token),
                on_malformed=on_malformed,
                on_dropped=drops_on(transport.value),
            )
        stack.push_async_callback(zmq.close)
        return zmq, zmq
    namespace, token = planes.namespace, token_of(planes)
    recovery = NatsRecovery(required_nats(nats), namespace=namespace, token=token, on_malformed=on_malformed)
    stack.push_async_callback(recovery.close)
    if transport is EventTransport.NATS:
        core = NatsEventPublisher(
            required_nats(nats),
            namespace=namespace,
            component=component,
            token=token,
            on_dropped=drops_on(transport.value),
        )
        stack.push_async_callback(core.close)
        return core, recovery
    stream = JetStreamPublisher(
        required_nats(nats),
        namespace=namespace,
        component=component,
        token=token,
        stream_limits=stream_limits(planes),
        observer=StreamHooks(),
    )
    stack.push_async_callback(stream.close)
    return stream, recovery
