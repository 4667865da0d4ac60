"""A front door over a router, from its sockets to its drain: the same for every command that serves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from socket import socket

from kvrouter.assembly.address import explained
from kvrouter.assembly.lifetime import descriptors_for
from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName
from kvrouter.frontend.app import FrontDoor
from kvrouter.frontend.door import Door
from kvrouter.frontend.http import HttpServer
from kvrouter.frontend.readiness import Awaited, nobody_awaited
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel

GOODBYE_S = 1.0
"""How long the last answers may take to reach their clients once all requests have ended."""


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """A router that serves HTTP."""

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
async def open_door(
    service: RouterService,
    texts: Mapping[ModelName, TextModel],
    *,
    settings: FrontendSettings,
    telemetry: Telemetry,
    sockets: list[socket],
    awaited: Awaited = nobody_awaited,
) -> AsyncIterator[OpenDoor]:
    """Start the router and serve it on ``sockets``, which are bound already; ``awaited`` tells of engines
    that are to come. Raises CannotListen.
    """
    door = FrontDoor(service, texts, settings=settings, telemetry=telemetry, awaited=awaited)
    end = telemetry.before_scrape(lambda: telemetry.engines_awaited.set(len(awaited())))
    try:
        async with serving(service, door, settings=settings, sockets=sockets) as server:
            yield OpenDoor(service, server, telemetry)
    finally:
        end()
        door.close()


@asynccontextmanager
async def serving(
    service: RouterService, door: Door, *, settings: FrontendSettings, sockets: list[socket]
) -> AsyncIterator[HttpServer]:
    """Start the router and serve this door of it, whichever it is. Raises CannotListen."""
    room = descriptors_for(settings.connections_max)
    server = door.server(
        connections_max=room.connections_max, descriptors_max=room.numbers_max, refused_max=room.refused_max
    )
    end = door.observed.watch(server)
    try:
        await service.start()
        with explained(settings.http_host, settings.http_port):
            await server.serve(sockets=sockets)
        yield server
    finally:
        await server.drain(0.0)
        service.stop()
        end()
