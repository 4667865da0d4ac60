"""``kvrouter router``: the standalone router, for engines behind another proxy."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from kvrouter.app.followed_links import following_links
from kvrouter.app.frontend_server import GOODBYE_S, ServingApp, serving
from kvrouter.app.lifetime import allow_many_files, claimed, stop_on_signals
from kvrouter.cli.frontend.run import connected, saving
from kvrouter.cli.router.flags import StandaloneOptions
from kvrouter.cli.up.run import serve_until
from kvrouter.core.ids import ModelName
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.frontend.standalone import RouterApp
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.bookings import Bookings
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.prefill_dispatch import PrefillDispatch
from kvrouter.settings.setting import installed_version
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.standalone")


@dataclass(frozen=True, slots=True)
class Standalone(ServingApp):
    """A standalone router that serves HTTP."""

    bookings: Bookings
    prefills: PrefillDispatch

    async def drain(self, limit_s: float) -> int:
        """Stop new work; wait up to ``limit_s`` until all bookings are freed. Return how many are left."""
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
    takes_prefills = options.component == "prefill"

    def takes(card: WorkerCard) -> bool:
        return options.component in ("all", "prefill" if card.role is Role.PREFILL else "backend")

    async with (
        claimed(front.http_host, front.http_port) as sockets,
        connected(
            settings, telemetry, sockets, sources, links, takes=takes, prefill_alone=takes_prefills
        ) as found,
    ):
        observed = ServiceInstrumentation(telemetry)
        bookings = Bookings(
            bookings_max=options.bookings_max,
            lease_ttl_s=options.lease_ttl_s,
            on_lapsed=observed.booking_lapsed,
        )
        prefills = PrefillDispatch(
            found.transports.requests,
            bookings,
            observed,
            redispatches_max=router.retries_max,
            limit_s=router.request_timeout_s,
            prefills_max=options.prefills_max,
        )
        app = RouterApp(
            found.service,
            found.texts,
            bookings,
            prefills,
            settings=front,
            telemetry=telemetry,
            lease_ttl_s=options.lease_ttl_s,
            takes_prefills=takes_prefills,
            tracing=found.spans,
        )
        async with (
            serving(found.service, app, settings=front, sockets=sockets) as server,
            saving(found.transports.snapshots, found.service, router.snapshot_threshold),
            following_links(router, found.service),
        ):
            try:
                yield Standalone(found.service, server, telemetry, bookings, prefills)
            finally:
                await prefills.close()
                bookings.close()
                app.close()


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
