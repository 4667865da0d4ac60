"""``kvrouter up --engine-pods`` and ``kvrouter worker pods``: workers for the engines of labelled pods."""

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.app.attach.attachment import EngineWorkers
from kvrouter.app.attach.pod_fleet import PodFleet, WatchedPods, account_of, pods_followed, policy_of
from kvrouter.app.attach.transport_provider import MemoryTransports, network_transports
from kvrouter.app.followed_links import following_links
from kvrouter.app.frontend_place import following_place, read_place
from kvrouter.app.frontend_server import ServingApp, open_frontend
from kvrouter.app.learned_file import keeping_learned
from kvrouter.app.lifetime import (
    StopRequested,
    allow_many_files,
    claimed,
    settle_memory,
    stop_on_signals,
    unless_stopping,
)
from kvrouter.app.mock_fleet import ProcessTransports
from kvrouter.app.router_build import build_service
from kvrouter.app.text_models import TextModelLoader, encode_pool
from kvrouter.app.tls import address_warnings
from kvrouter.app.traffic_recording import recording
from kvrouter.cli.up.run import serve_until
from kvrouter.cli.worker.worker_process import WorkerHealth, health_pages
from kvrouter.core.hosts import in_container
from kvrouter.core.ids import ModelName
from kvrouter.fleetfile.worker_options import EnginePods
from kvrouter.settings.setting import installed_version
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.records.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.requests.memory import MemoryRequestTransport

_log = logging.getLogger("kvrouter.up")
_worker_log = logging.getLogger("kvrouter.worker")


class PodsDiscovery(MemoryDiscovery):
    """The cards of this process; its store counts as lost while pods cannot be watched."""

    def __init__(self) -> None:
        super().__init__()
        self._stores: dict[object, StoreSink] = {}
        self._lost: str | None = None

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, and whether pods can be watched."""
        end_cards = await super().watch(on_card, on_gone)
        key = object()
        if on_store is not None:
            self._stores[key] = on_store
            if self._lost is not None:
                on_store(False, self._lost)

        def end() -> None:
            self._stores.pop(key, None)
            end_cards()

        return end

    def on_store(self, is_reachable: bool, why: str) -> None:
        """Pods can be watched again, or can no longer."""
        self._lost = None if is_reachable else why
        for on_store in tuple(self._stores.values()):
            on_store(is_reachable, why)


@asynccontextmanager
async def pods_served(
    settings: Settings, watched: WatchedPods, sources: Mapping[ModelName, str]
) -> AsyncIterator[ServingApp]:
    """Serve the engines of labelled pods behind one frontend, on this event loop; ``sources`` are the local
    tokenizers, by model.

    Raises CannotListen, before any request, if the frontend's address is not available.
    """
    front = settings.frontend
    place = await read_place(settings.router, os.environ)
    telemetry = Telemetry()
    telemetry.build_info.set(1, installed_version())
    discovery = PodsDiscovery()
    transports = ProcessTransports(discovery, MemoryEventTransport(), MemoryRequestTransport())
    pool = encode_pool(front)
    async with AsyncExitStack() as stack:
        sockets = await stack.enter_async_context(claimed(front.http_host, front.http_port))
        traffic = await stack.enter_async_context(recording(settings.recording, telemetry))
        stack.callback(pool.close)
        stack.push_async_callback(transports.requests.close)
        service = build_service(
            settings.router,
            request_transport=transports.requests,
            discovery=discovery,
            subscriber=transports.events,
            telemetry=telemetry,
            traffic=traffic,
            place=place.domains,
        )
        await stack.enter_async_context(following_place(place, service))
        await stack.enter_async_context(following_links(settings.router, service))
        await stack.enter_async_context(keeping_learned(settings.router, service))
        loader = TextModelLoader(sources, pool, fallback=front.tokenize_fallback)
        stack.push_async_callback(loader.loaded)
        stack.callback(await discovery.watch(loader.on_card, loader.on_gone))
        workers = EngineWorkers(settings, MemoryTransports(transports))
        fleet = await stack.enter_async_context(
            pods_followed(watched, workers, drain_limit_s=front.drain_limit_s, on_store=discovery.on_store)
        )
        yield await stack.enter_async_context(
            open_frontend(
                service,
                loader.of_models,
                settings=front,
                telemetry=telemetry,
                sockets=sockets,
                expected=fleet.expected,
            )
        )


def serve_engine_pods(
    settings: Settings, pods: EnginePods, sources: Mapping[ModelName, str], environ: Mapping[str, str]
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises CannotListen, ConfigError."""
    policy, warnings = policy_of(environ)
    watched = WatchedPods(account_of(settings, "--engine-pods"), pods, policy)
    for warning in warnings:
        log_event(_log, Event.CONFIG_WARNING, detail=warning)
    allow_many_files()
    return uvloop.run(_serve(settings, watched, sources))


async def _serve(settings: Settings, watched: WatchedPods, sources: Mapping[ModelName, str]) -> int:
    log_event(_log, Event.START, version=installed_version())
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(stop_on_signals())
        try:
            async with unless_stopping(stopping):
                app = await stack.enter_async_context(pods_served(settings, watched, sources))
        except StopRequested:
            log_event(_log, Event.STOP)
            return 0
        await serve_until(stopping, app, drain_limit_s=settings.frontend.drain_limit_s)
    return 0


def serve_pod_workers(
    settings: Settings, pods: EnginePods, environ: Mapping[str, str], *, drain_limit_s: float
) -> int:
    """Announce a worker for each engine until SIGTERM or SIGINT, then drain. Returns the exit code; raises
    NatsUnreachable, ConfigError.
    """
    policy, warnings = policy_of(environ)
    watched = WatchedPods(account_of(settings, "kvrouter worker pods"), pods, policy)
    for warning in (*warnings, *address_warnings(settings, in_container=in_container(environ))):
        log_event(_worker_log, Event.CONFIG_WARNING, detail=warning)
    allow_many_files()
    return uvloop.run(_announce(settings, watched, drain_limit_s=drain_limit_s))


class _Following:
    """The progress of the process, and its log on the API server: it is ok once it has read the pods, since
    losing the API server stops no worker.
    """

    def __init__(self) -> None:
        self.health = WorkerHealth.STARTING
        self.fleet: PodFleet | None = None
        """The followed pods; None until they are."""

        self._is_lost = False

    def on_store(self, is_reachable: bool, why: str) -> None:
        """Pods can be watched again, or can no longer."""
        log_event(_worker_log, Event.DISCOVERY_BACK if is_reachable else Event.DISCOVERY_LOST, reason=why)
        self._is_lost = not is_reachable
        self.on_asked()

    def on_asked(self) -> None:
        """The pods were asked for."""
        if self.health is WorkerHealth.STARTING and not self._is_lost:
            self.health = WorkerHealth.OK

    def expected(self) -> Sequence[ExpectedEngine]:
        """The engines of the followed pods."""
        return () if self.fleet is None else self.fleet.expected()

    def drain(self) -> None:
        """The process was asked to stop."""
        self.health = WorkerHealth.DRAINING


async def _announce(settings: Settings, watched: WatchedPods, *, drain_limit_s: float) -> int:
    following = _Following()
    log_event(_worker_log, Event.START, version=installed_version())
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(stop_on_signals())
        await stack.enter_async_context(
            health_pages(settings.planes, lambda: following.health, following.expected)
        )
        try:
            async with unless_stopping(stopping):
                transports = await stack.enter_async_context(network_transports(settings))
                followed = pods_followed(
                    watched,
                    EngineWorkers(settings, transports),
                    drain_limit_s=drain_limit_s,
                    on_store=following.on_store,
                )
                fleet = await stack.enter_async_context(followed)
        except StopRequested:
            log_event(_worker_log, Event.STOP)
            return 0
        following.fleet = fleet
        following.on_asked()
        settle_memory()
        log_event(_worker_log, Event.READY, workers=len(fleet.workers))
        await stopping.wait()
        following.drain()
        log_event(_worker_log, Event.DRAIN, workers=len(fleet.workers))
        await fleet.drain()
    log_event(_worker_log, Event.STOP)
    return 0
