"""``kvrouter up``: the embedded system, from its first line to its last."""

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from kvrouter.assembly.address import claimed, explained
from kvrouter.assembly.mock_fleet import MockFleet, link_table
from kvrouter.assembly.router import build_service
from kvrouter.config import FleetFile, Settings
from kvrouter.config.version import installed_version
from kvrouter.frontend.app import FrontDoor
from kvrouter.frontend.http import HttpServer
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.up")

GOODBYE_S = 1.0
"""How long the last answers may take to reach their clients once all requests have ended."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Everything of one ``kvrouter up``."""

    fleet: MockFleet
    service: RouterService
    server: HttpServer
    telemetry: Telemetry

    @property
    def address(self) -> tuple[str, int]:
        """Where the front door listens."""
        return self.server.addresses[0]

    async def drain(self, limit_s: float) -> int:
        """Take no new requests, let running ones finish; return how many were cut at the limit.

        Until they have finished the door stays open: who knocks is told that the router shuts down, and what
        is cut gets an error, not silence.
        """
        cut = await self.service.drain(limit_s)
        await self.server.drain(GOODBYE_S)
        return cut


@asynccontextmanager
async def embedded(settings: Settings, fleet: FleetFile) -> AsyncIterator[Embedded]:
    """Serve a fleet of mock engines behind one front door, on this event loop.

    Raises CannotListen, before any worker starts, when the front door's address cannot be had.
    """
    host, port = settings.frontend.http_host, settings.frontend.http_port
    telemetry = Telemetry()
    telemetry.build_info.set(1, installed_version())
    async with claimed(host, port) as sockets, MockFleet(fleet) as mock:
        service = build_service(
            settings.router,
            plane=mock.requests,
            discovery=mock.discovery,
            subscriber=mock.events,
            telemetry=telemetry,
            links=link_table(fleet),
        )
        await service.start()
        door = FrontDoor(service, mock.texts, settings=settings.frontend, telemetry=telemetry)
        server = door.server()
        try:
            with explained(host, port):
                await server.serve(sockets=sockets)
            yield Embedded(mock, service, server, telemetry)
        finally:
            await server.drain(0.0)
            service.stop()


def serve(settings: Settings, fleet: FleetFile) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises CannotListen."""
    return uvloop.run(_serve(settings, fleet))


async def _serve(settings: Settings, fleet: FleetFile) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    log_event(
        logger,
        Event.START,
        version=installed_version(),
        models=",".join(model.name for model in fleet.models),
        workers=sum(group.replicas for group in fleet.workers),
    )
    async with embedded(settings, fleet) as system:
        # What was loaded stays: the collector need not walk tokenizers and tables again and again.
        gc.collect()
        gc.freeze()
        host, port = system.address
        log_event(logger, Event.READY, host=host, port=port)
        await stopping.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second one ends the process at once
        began_s = loop.time()
        log_event(logger, Event.DRAIN, running_requests=system.service.running)
        cut = await system.drain(settings.frontend.drain_limit_s)
        log_event(logger, Event.STOP, duration_s=loop.time() - began_s, running_requests=cut)
    return 0
