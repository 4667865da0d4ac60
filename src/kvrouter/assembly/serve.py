"""``kvrouter up``: the embedded system, from its first line to its last."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from kvrouter.assembly.address import claimed
from kvrouter.assembly.described import link_table
from kvrouter.assembly.door import OpenDoor, open_door
from kvrouter.assembly.lifetime import settle_memory, told_to_stop
from kvrouter.assembly.mock_fleet import MockFleet
from kvrouter.assembly.router import build_service
from kvrouter.config import FleetFile, Settings
from kvrouter.config.version import installed_version
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.up")


@dataclass(frozen=True, slots=True)
class Embedded(OpenDoor):
    """Everything of one ``kvrouter up``."""

    fleet: MockFleet


@asynccontextmanager
async def embedded(settings: Settings, fleet: FleetFile) -> AsyncIterator[Embedded]:
    """Serve a fleet of mock engines behind one front door, on this event loop.

    Raises CannotListen, before any worker starts, when the front door's address cannot be had.
    """
    front = settings.frontend
    telemetry = Telemetry()
    telemetry.build_info.set(1, installed_version())
    async with claimed(front.http_host, front.http_port) as sockets, MockFleet(fleet) as mock:
        service = build_service(
            settings.router,
            plane=mock.requests,
            discovery=mock.discovery,
            subscriber=mock.events,
            telemetry=telemetry,
            links=link_table(fleet),
        )
        async with open_door(
            service, mock.texts, settings=front, telemetry=telemetry, sockets=sockets
        ) as door:
            yield Embedded(door.service, door.server, door.telemetry, mock)


def serve(settings: Settings, fleet: FleetFile) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises CannotListen."""
    return uvloop.run(_serve(settings, fleet))


async def _serve(settings: Settings, fleet: FleetFile) -> int:
    log_event(
        logger,
        Event.START,
        version=installed_version(),
        models=",".join(model.name for model in fleet.models),
        workers=sum(group.replicas for group in fleet.workers),
    )
    with told_to_stop() as stopping:
        async with embedded(settings, fleet) as system:
            await serve_until(stopping, system, drain_limit_s=settings.frontend.drain_limit_s)
    return 0


async def serve_until(stopping: asyncio.Event, door: OpenDoor, *, drain_limit_s: float) -> None:
    """Say that the door is open, wait for the end, and drain."""
    settle_memory()
    host, port = door.address
    log_event(logger, Event.READY, host=host, port=port)
    await stopping.wait()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    log_event(logger, Event.DRAIN, running_requests=door.service.running)
    cut = await door.drain(drain_limit_s)
    log_event(logger, Event.STOP, duration_s=loop.time() - began_s, running_requests=cut)
