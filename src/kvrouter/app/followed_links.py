"""Follows the file of the link table, and passes changes to the router."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.link_table import file_of_links, read_links
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import running

logger = logging.getLogger("kvrouter.router")

POLL_S = 2.0
"""Seconds between two reads; a kubelet itself takes up to two minutes to show a changed ConfigMap."""


@asynccontextmanager
async def following_links(
    config: KvRouterConfig, service: RouterService, *, poll_s: float = POLL_S
) -> AsyncIterator[None]:
    """Pass the link table in the file of ``router_links`` to the router, and each later change."""
    given = config.router_links
    if given is None or file_of_links(given) is None:
        yield
        return
    async with running(_follow(given, service, poll_s), name="links: follow their file"):
        yield


async def _follow(given: str, service: RouterService, poll_s: float) -> None:
    """Read the file for ever. An unreadable or invalid file changes nothing, and is logged once."""
    last: LinkTable | None = None
    refused: str | None = None
    while True:
        try:
            table = await asyncio.to_thread(read_links, given)
        except ConfigError as error:
            if error.message != refused:
                log_event(logger, Event.LINKS_REFUSED, reason=error.message)
            refused = error.message
        else:
            if last is None or not table.has_same_links(last):
                service.links_changed(table)
                if last is not None:
                    log_event(logger, Event.LINKS_READ, detail=given)
            last, refused = table, None
        await asyncio.sleep(poll_s)
