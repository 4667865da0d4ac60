"""``kvrouter frontend``: an HTTP frontend for workers in other processes, found by discovery."""

import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from socket import socket
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from kvrouter.app.attach.engine_prober import EngineProber
from kvrouter.app.followed_links import following_links
from kvrouter.app.frontend_place import following_place, read_place
from kvrouter.app.frontend_server import ServingApp, open_frontend
from kvrouter.app.learned_file import keeping_learned
from kvrouter.app.lifetime import allow_many_files, claimed, stop_on_signals
from kvrouter.app.router_build import build_service
from kvrouter.app.router_transports import RouterTransports, open_router_transports
from kvrouter.app.telemetry_hooks import SyncGauges
from kvrouter.app.text_models import TextModelLoader, encode_pool
from kvrouter.app.trace_export import tracing
from kvrouter.app.traffic_recording import recording
from kvrouter.cli.up.run import serve_until
from kvrouter.core.ids import ModelName
from kvrouter.core.workers import WorkerCard
from kvrouter.engines.attach import AttachSpec
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.index_snapshots import IndexSnapshots, fed_caches
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.router_service import RouterService
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.setting import installed_version
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, Telemetry, log_event, wants_gen_ai
from kvrouter.telemetry.joined_workers import joined_as_table
from kvrouter.transports.events.port import SnapshotStore
from kvrouter.transports.records.narrowed import NarrowedDiscovery

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestTracing

logger = logging.getLogger("kvrouter.frontend")


@asynccontextmanager
async def frontend(
    settings: Settings,
    sources: Mapping[ModelName, str],
    links: LinkTable | None = None,
    static: Sequence[WorkerCard] = (),
    engines: Sequence[AttachSpec] = (),
) -> AsyncIterator[ServingApp]:
    """Serve the workers of the namespace, or those of ``static`` alone, on this event loop.

    ``sources`` are this host's tokenizers by model; other models are tokenized by the folder that their
    workers name. ``engines`` are named when no worker announces them. Raises CannotListen, NatsUnreachable,
    or ConfigError.
    """
    front = settings.frontend
    telemetry = Telemetry(gen_ai=wants_gen_ai(os.environ))
    cluster = settings.planes.cluster if settings.planes.clusters else None
    place = await read_place(settings.router, os.environ, cluster=cluster)
    async with (
        claimed(front.http_host, front.http_port) as sockets,
        recording(settings.recording, telemetry) as traffic,
        connected(
            settings, telemetry, sockets, sources, links, static=static, traffic=traffic, place=place.domains
        ) as router,
        EngineProber(engines, router.service) as prober,
        open_frontend(
            router.service,
            router.texts,
            settings=front,
            telemetry=telemetry,
            sockets=sockets,
            expected=prober.expected,
            tracing=router.spans,
        ) as app,
        saving(router.transports.snapshots, router.service, settings.router.snapshot_threshold),
        following_place(place, router.service),
        following_links(settings.router, router.service),
    ):
        yield app


class Connected(NamedTuple):
    """A router with its transports and tokenizers, before it is started and served."""

    service: RouterService
    transports: RouterTransports
    texts: ModelTexts
    spans: "RequestTracing | None"


@asynccontextmanager
async def connected(
    settings: Settings,
    telemetry: Telemetry,
    sockets: Sequence[socket],
    sources: Mapping[ModelName, str],
    links: LinkTable | None,
    *,
    static: Sequence[WorkerCard] = (),
    takes: Callable[[WorkerCard], bool] = lambda _: True,
    prefill_alone: bool = False,
    traffic: TrafficRecorder | None = None,
    place: Mapping[str, str] | None = None,
) -> AsyncIterator[Connected]:
    """Connect a router that will be served on ``sockets`` to the workers that ``takes`` returns true for, and
    load their tokenizers as they are announced. Raises NatsUnreachable, or ConfigError.
    """
    telemetry.build_info.set(1, installed_version())
    pool = encode_pool(settings.frontend)
    loader = TextModelLoader(sources, pool, fallback=settings.frontend.tokenize_fallback)
    port = sockets[0].getsockname()[1]
    try:
        async with (
            tracing(os.environ, version=installed_version()) as spans,
            open_router_transports(settings, telemetry, http_port=port, static=static) as transports,
        ):
            discovery = NarrowedDiscovery(transports.discovery, takes)
            sync = transports.replica_sync()
            service = build_service(
                settings.router,
                request_transport=transports.requests,
                discovery=discovery,
                subscriber=transports.events,
                cordons=transports.cordons,
                telemetry=telemetry,
                links=links,
                sync=sync,
                prefill_alone=prefill_alone,
                traffic=traffic,
                place=place,
            )
            stop_texts = await discovery.watch(loader.on_card, loader.on_gone)
            async with syncing(sync, telemetry), keeping_learned(settings.router, service):
                yield Connected(service, transports, loader.of_models, spans)
            stop_texts()
    finally:
        await loader.loaded()
        pool.close()


@asynccontextmanager
async def syncing(sync: ReplicaSync | None, telemetry: Telemetry) -> AsyncIterator[None]:
    """Publish to other routers, and count their requests, if replica sync is on."""
    if sync is None:
        yield
        return
    await sync.start()
    end = telemetry.before_scrape(SyncGauges(telemetry, sync).refresh)
    try:
        yield
    finally:
        end()
        await sync.stop()


@asynccontextmanager
async def saving(
    store: SnapshotStore | None, service: RouterService, messages_max: int
) -> AsyncIterator[None]:
    """Save the index when the stream grows too long, if there is a stream."""
    if store is None:
        yield
        return
    snapshots = IndexSnapshots(
        store, lambda: fed_caches(service.models()), messages_max=messages_max, seed=random.getrandbits(32)
    )
    snapshots.start()
    try:
        yield
    finally:
        await snapshots.stop()


def serve_frontend(
    settings: Settings,
    sources: Mapping[ModelName, str],
    links: LinkTable | None = None,
    static: Sequence[WorkerCard] = (),
    engines: Sequence[AttachSpec] = (),
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code."""
    return uvloop.run(_serve(settings, sources, links, static, engines))


async def _serve(
    settings: Settings,
    sources: Mapping[ModelName, str],
    links: LinkTable | None,
    static: Sequence[WorkerCard],
    engines: Sequence[AttachSpec],
) -> int:
    allow_many_files()
    log_event(logger, Event.START, version=installed_version(), models=",".join(sources))
    with stop_on_signals() as stopping, joined_as_table() as show_joined:
        async with frontend(settings, sources, links, static, engines) as app:
            show_joined()
            await serve_until(stopping, app, drain_limit_s=settings.frontend.drain_limit_s)
    return 0
