"""``kvrouter router``: the standalone router, for engines behind another proxy."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from kvrouter.commands.frontend import saving, syncing
from kvrouter.commands.learned_file import keeping
from kvrouter.commands.options import StandaloneOptions
from kvrouter.commands.up import serve_until
from kvrouter.config import Settings
from kvrouter.config.setting import installed_version
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.frontend.standalone import RouterApp
from kvrouter.processes.lifetime import allow_many_files, claimed, stop_on_signals
from kvrouter.service.bookings import Bookings
from kvrouter.service.instrumentation import ServiceInstrumentation
from kvrouter.service.prefill_dispatch import PrefillDispatch
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.topology import LinkTable
from kvrouter.transports.discovery.port import CardSink, Discovery, GoneSink, StoreSink
from kvrouter.wiring.followed_links import following_links
from kvrouter.wiring.frontend import GOODBYE_S, ServingApp, serving
from kvrouter.wiring.router import build_service, new_router_id
from kvrouter.wiring.router_transports import router_wires
from kvrouter.wiring.text_models import TextModelLoader, encode_pool
from kvrouter.wiring.tracing import tracing

logger = logging.getLogger("kvrouter.standalone")


@dataclass(frozen=True, slots=True)
class Standalone(ServingApp):
    """A standalone router that serves HTTP."""

    bookings: Bookings
    prefills: PrefillDispatch

    async def drain(self, limit_s: float) -> int:
        """Book and prefill nothing more; wait until all is freed, or ``limit_s``. Return what was left."""
        until_s = asyncio.get_running_loop().time() + limit_s
        await self.service.requests.drain(0.0)
        left = 0
        for wait in (self.prefills.wait_idle, self.bookings.wait_empty):
            left += await wait(max(0.0, until_s - asyncio.get_running_loop().time()))
        await self.server.drain(GOODBYE_S)
        return left


@asynccontextmanager
async def standalone(
    settings: Settings,
    options: StandaloneOptions,
    sources: Mapping[ModelName, str],
    links: LinkTable | None = None,
) -> AsyncIterator[Standalone]:
    """Serve decisions over the namespace's workers of the component, on this event loop.

    Raises CannotListen, or NatsUnreachable.
    """
    front, router = settings.frontend, settings.router
    telemetry = Telemetry()
    telemetry.build_info.set(1, installed_version())
    pool = encode_pool(front)
    loader = TextModelLoader(sources, pool, fallback=front.tokenize_fallback)
    try:
        async with (
            claimed(front.http_host, front.http_port) as sockets,
            tracing(os.environ, version=installed_version()) as spans,
            router_wires(settings, telemetry, http_port=sockets[0].getsockname()[1]) as wires,
        ):
            discovery = OfComponent(wires.discovery, options.component)
            router_id = new_router_id()
            sync = wires.replica_sync(router_id)
            service = build_service(
                router,
                plane=wires.requests,
                discovery=discovery,
                subscriber=wires.events,
                cordons=wires.cordons,
                telemetry=telemetry,
                links=links,
                router_id=router_id,
                sync=sync,
                prefill_alone=options.component == "prefill",
            )
            observed = ServiceInstrumentation(telemetry)
            bookings = Bookings(
                bookings_max=options.bookings_max,
                lease_ttl_s=options.lease_ttl_s,
                on_lapsed=observed.booking_lapsed,
            )
            prefills = PrefillDispatch(
                wires.requests,
                bookings,
                observed,
                redispatches_max=router.retries_max,
                limit_s=router.request_timeout_s,
                prefills_max=options.prefills_max,
            )
            app = RouterApp(
                service,
                loader.texts,
                bookings,
                prefills,
                settings=front,
                telemetry=telemetry,
                lease_ttl_s=options.lease_ttl_s,
                takes_prefills=options.component == "prefill",
                tracing=spans,
                unread=loader.unread,
                by_engine=loader.by_engine,
            )
            stop_texts = await discovery.watch(loader.on_card, loader.on_gone)
            async with (
                syncing(sync, telemetry),
                keeping(router, service),
                serving(service, app, settings=front, sockets=sockets) as server,
                saving(wires.snapshots, service, router.snapshot_threshold),
                following_links(router, service),
            ):
                try:
                    yield Standalone(service, server, telemetry, bookings, prefills)
                finally:
                    await prefills.close()
                    bookings.close()
                    app.close()
            stop_texts()
    finally:
        await loader.loaded()
        pool.close()


class OfComponent:
    """Discovery narrowed to the workers of one component: prefill workers, or all others."""

    def __init__(self, discovery: Discovery, component: str) -> None:
        self._discovery = discovery
        self._component = component

    async def publish(self, card: WorkerCard) -> None:
        """Pass on."""
        await self._discovery.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Pass on."""
        await self._discovery.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver only the component's cards."""

        def on_any_card(card: WorkerCard) -> None:
            if self._component in ("all", "prefill" if card.role is Role.PREFILL else "backend"):
                on_card(card)

        return await self._discovery.watch(on_any_card, on_gone, on_store)

    async def close(self) -> None:
        """Discovery is closed by its maker."""


def serve_standalone(
    settings: Settings,
    options: StandaloneOptions,
    sources: Mapping[ModelName, str],
    links: LinkTable | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code."""
    return uvloop.run(_serve(settings, options, sources, links))


async def _serve(
    settings: Settings, options: StandaloneOptions, sources: Mapping[ModelName, str], links: LinkTable | None
) -> int:
    allow_many_files()
    log_event(logger, Event.START, version=installed_version(), role=options.component)
    with stop_on_signals() as stopping:
        async with standalone(settings, options, sources, links) as router:
            await serve_until(stopping, router, drain_limit_s=settings.frontend.drain_limit_s)
    return 0
