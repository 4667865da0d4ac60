"""A fleet of mock engines in this process, to try a program against."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvrouter.commands import MockFleet
from kvrouter.config import MockEngineSpec, default_fleet_document, load_fleet, read_document
from kvrouter.config.problems import dotted
from kvrouter.core.errors import ConfigError
from kvrouter.library.runtime import Runtime


@asynccontextmanager
async def mock_fleet(path: Path | None = None) -> AsyncIterator[Runtime]:
    """Run the fleet of a fleet file (by default two zones, 1 prefill and 2 decode workers each).

    Raises ConfigError with a line for each mistake in the file; an engine that is no mock engine is one.
    """
    document = default_fleet_document() if path is None else read_document(path)
    described = load_fleet(document).fleet
    for position, group in enumerate(described.workers):
        if not isinstance(group.engine, MockEngineSpec):
            at = ("workers", position, "engine", "kind")
            raise ConfigError(f"{document.place(at)}: must be 'mock' here", param=dotted(at))
    async with MockFleet(described) as fleet:
        yield Runtime(fleet.discovery, fleet.requests, fleet.events)
