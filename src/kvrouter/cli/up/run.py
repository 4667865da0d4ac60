"""``kvrouter up``: frontend, router and workers in one process."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import uvloop

from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.app.fleet_build import tokenizer_sources
from kvrouter.app.followed_links import following_links
from kvrouter.app.frontend_place import following_place, read_place
from kvrouter.app.frontend_server import ServingApp, open_frontend
from kvrouter.app.learned_file import keeping_learned
from kvrouter.app.lifetime import StopRequested, claimed, settle_memory, stop_on_signals, unless_stopping
from kvrouter.app.mock_fleet import MockFleet, ProcessTransports
from kvrouter.app.router_build import build_service
from kvrouter.app.text_models import LOG_AFTER_S, TextModelLoader
from kvrouter.app.tls import loopback_warning
from kvrouter.app.trace_export import tracing
from kvrouter.app.traffic_recording import recording
from kvrouter.cli.up.engine_lines import first_screen, url_of, write_changes, write_text
from kvrouter.cli.up.link_events import LinkStep, happening, read_link_events
from kvrouter.core.hosts import in_container
from kvrouter.core.ids import ModelName
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.frontend.fleet_state import no_expected_engines
from kvrouter.settings.problems import FieldPlace, dotted
from kvrouter.settings.setting import installed_version
from kvrouter.settings.tree import LogFormat, Settings
from kvrouter.telemetry import Event, Telemetry, log_event, wants_gen_ai
from kvrouter.telemetry.joined_workers import joined_as_table
from kvrouter.telemetry.logs import flush_log
from kvrouter.transports.background import running

if TYPE_CHECKING:
    from kvrouter.app.attach.attached_fleet import AttachedFleet

logger = logging.getLogger("kvrouter.up")


@dataclass(frozen=True, slots=True)
class Embedded(ServingApp):
    """Everything of one ``kvrouter up``."""

    fleet: MockFleet
    attached: "AttachedFleet | None"
    """None where the fleet file has no engines that run already."""

    def expected(self) -> Sequence[ExpectedEngine]:
        """The engines that run already, with or without a worker."""
        return () if self.attached is None else self.attached.expected()


@asynccontextmanager
async def embedded(
    settings: Settings,
    fleet: FleetFile,
    *,
    environ: Mapping[str, str] = os.environ,
    sources: Mapping[ModelName, str] = MappingProxyType({}),
    place: FieldPlace = dotted,
) -> AsyncIterator[Embedded]:
    """Serve a fleet file's engines behind one frontend, on this event loop: mock engines in this process, and
    a worker for each running engine, which gets its key of ``environ`` if it has one. ``sources`` are further
    tokenizers, by model; ``place`` names where a field of the file is written.

    Raises CannotListen, before any worker starts, if the frontend's address is not available, and ConfigError
    for engines that contradict the file.
    """
    front = settings.frontend
    telemetry = Telemetry(gen_ai=wants_gen_ai(os.environ))
    telemetry.build_info.set(1, installed_version())
    sources = {**tokenizer_sources(fleet), **sources}
    frontend_place = await read_place(settings.router, os.environ)
    async with (
        claimed(front.http_host, front.http_port) as sockets,
        recording(settings.recording, telemetry) as traffic,
        tracing(os.environ, version=installed_version()) as spans,
        MockFleet(fleet) as mock,
    ):
        service = build_service(
            settings.router,
            request_transport=mock.requests,
            discovery=mock.discovery,
            subscriber=mock.events,
            telemetry=telemetry,
            links=link_table(fleet),
            traffic=traffic,
            place=frontend_place.domains,
        )
        loader = TextModelLoader(
            sources, mock.encode_pool, mock.texts, fallback=settings.frontend.tokenize_fallback
        )
        stop_texts = await mock.discovery.watch(loader.on_card, loader.on_gone)
        try:
            async with _attached(settings, fleet, mock.transports, environ, place) as attached:
                await loader.loaded(limit_s=LOG_AFTER_S)
                async with (
                    keeping_learned(settings.router, service),
                    open_frontend(
                        service,
                        loader.of_models,
                        settings=front,
                        telemetry=telemetry,
                        sockets=sockets,
                        expected=no_expected_engines if attached is None else attached.expected,
                        tracing=spans,
                    ) as app,
                    following_place(frontend_place, service),
                    following_links(settings.router, service),
                ):
                    yield Embedded(app.service, app.server, app.telemetry, mock, attached)
        finally:
            stop_texts()
            await loader.loaded()


@asynccontextmanager
async def _attached(
    settings: Settings,
    fleet: FleetFile,
    transports: ProcessTransports,
    environ: Mapping[str, str],
    place: FieldPlace,
) -> AsyncIterator["AttachedFleet | None"]:
    """Yield the workers of running engines; their modules are imported only if there are any."""
    if not any(isinstance(group.engine, AttachedEngineSpec) for group in fleet.workers):
        yield None
        return
    from kvrouter.app.attach.attached_fleet import AttachedFleet  # noqa: PLC0415

    async with AttachedFleet(fleet, settings, transports, environ=environ, place=place) as attached:
        yield attached


def serve(
    settings: Settings,
    fleet: FleetFile,
    events: Path | None,
    sources: Mapping[ModelName, str],
    place: FieldPlace,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; links change by the file ``events`` meanwhile. ``sources``
    and ``place`` are those of :func:`embedded`.

    Returns the exit code; raises CannotListen, ConfigError.
    """
    steps = () if events is None else read_link_events(events, fleet)
    return uvloop.run(_serve(settings, fleet, steps, sources, place))


async def _serve(
    settings: Settings,
    fleet: FleetFile,
    steps: Sequence[LinkStep],
    sources: Mapping[ModelName, str],
    place: FieldPlace,
) -> int:
    log_event(
        logger,
        Event.START,
        version=installed_version(),
        models=",".join(map(fleet.shown_name, fleet.models)),
        workers=sum(group.n_workers for group in fleet.workers),
    )
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(stop_on_signals())
        show_joined = stack.enter_context(joined_as_table())
        try:
            async with unless_stopping(stopping):
                system = await stack.enter_async_context(
                    embedded(settings, fleet, sources=sources, place=place)
                )
        except StopRequested:
            log_event(logger, Event.STOP)
            return 0
        show_joined()
        if settings.log.log_format is LogFormat.TEXT:
            expected = system.expected()
            await asyncio.to_thread(flush_log)  # the table comes first
            write_text(first_screen([url_of(*system.address)], fleet, expected))
            if system.attached is not None:
                changes = write_changes(expected, system.attached.changes())
                await stack.enter_async_context(running(changes, name="lines of engines"))
        async with happening(steps, system.fleet.cluster):
            await serve_until(stopping, system, drain_limit_s=settings.frontend.drain_limit_s)
    return 0


async def serve_until(stopping: asyncio.Event, app: ServingApp, *, drain_limit_s: float) -> None:
    """Log that the server listens, wait for the end, and drain."""
    settle_memory()
    host, port = app.address
    if in_container(os.environ):
        for warning in loopback_warning("http_host", "--http-host", host):
            log_event(logger, Event.CONFIG_WARNING, detail=warning)
    log_event(logger, Event.READY, host=host, port=port)
    await stopping.wait()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    log_event(logger, Event.DRAIN, running_requests=app.service.requests.running)
    cut = await app.drain(drain_limit_s)
    log_event(logger, Event.STOP, duration_s=loop.time() - began_s, running_requests=cut)
