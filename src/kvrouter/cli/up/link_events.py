"""Changes of the links between the mock engines of ``kvrouter up`` while they serve."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.mock_links import LinkChange
from kvrouter.fleetfile.fleet_engines import MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.timetable import LINK, entry_of, read_timetable
from kvrouter.sim.replay.timetable_plan import plan_timetable
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import running

_log = logging.getLogger("kvrouter.engines.mock_engine")


class LinkStep(NamedTuple):
    """A link changes ``at_s`` seconds of the engines' clock after the beginning; ``link`` and ``detail`` name
    it and its new state in words.
    """

    at_s: float
    change: LinkChange
    link: str
    detail: str


def read_link_events(path: Path, fleet: FleetFile) -> tuple[LinkStep, ...]:
    """Read a file of events as a replay does, for the mock engines of ``fleet``. Raises ConfigError for a
    fleet without them, for a mistake in the file, for events of other kinds than links, and for a link that
    no two of the engines share.
    """
    groups = tuple(group for group in fleet.workers if isinstance(group.engine, MockEngineSpec))
    if not groups:
        raise ConfigError("--events: the fleet has no mock engines, whose links could change")
    events = read_timetable(path, only=LINK)
    return tuple(
        LinkStep(step.event.at_s, step.link, entry.which, entry.change)
        for step in plan_timetable(events, fleet.model_copy(update={"workers": groups}))
        if step.link is not None
        for entry in (entry_of(step.event),)
    )


@asynccontextmanager
async def happening(steps: Sequence[LinkStep], cluster: MockCluster) -> AsyncIterator[None]:
    """Let each step happen when it is due, and log it, until the end: seconds count from now."""
    if not steps:
        yield
        return
    async with running(_happen(steps, cluster), name="events of links"):
        yield


async def _happen(steps: Sequence[LinkStep], cluster: MockCluster) -> None:
    began_s = cluster.now_s
    for step in steps:
        # The clock stands still where the machine is too slow, so one sleep may not be enough.
        while (left_s := began_s + step.at_s - cluster.now_s) > 0.0:  # noqa: ASYNC110 - a clock, no event
            await asyncio.sleep(left_s / cluster.speedup)
        cluster.change_link(step.change)
        log_event(_log, Event.MOCK_LINK_CHANGED, link=step.link, detail=step.detail)
