"""One deployment over all zones against one for each zone, with all decode workers and without one zone's."""

from collections.abc import Sequence

import msgspec

from benchmarks.replay.cases import CASES, Rows, rows_of
from benchmarks.replay.fleets import zoned
from benchmarks.replay.replays import OBJECTIVE, Figures, figures, simulation_of, whole
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.timetable import DieEvent, TimetableEvent

ZONES = (2, 3)
LOAD = 2.0
SLOWER = 20.0
"""How many times slower links between zones are."""

ONE = "one deployment, required"
SPLIT = "static split"


class ZoneJob(msgspec.Struct, frozen=True):
    """The conversation trace over so many zones; ``loses_decoders``: from a third of the time on zone a has
    no decode workers.
    """

    zones: int
    setup: str
    loses_decoders: bool
    rows: int
    seeds: int

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        return f"{self.zones} zones, {self.setup}{', decoders lost' if self.loses_decoders else ''}"


class ZoneCell(msgspec.Struct, frozen=True):
    """What came of a job; the policy of its figures is how it is set up."""

    zones: int
    loses_decoders: bool
    figures: Figures


def zone_jobs(rows: int, seeds: int) -> list[ZoneJob]:
    """Return every one."""
    return [
        ZoneJob(zones, setup, loses_decoders, rows, seeds)
        for zones in ZONES
        for loses_decoders in (False, True)
        for setup in (ONE, SPLIT)
    ]


def zone_cell(job: ZoneJob) -> ZoneCell:
    """Replay with every seed."""
    rows = rows_of(CASES[0], LOAD, job.rows)
    loss = (DieEvent(at_s=rows.rows[len(rows.rows) // 3].at_s, group="decode-a"),)
    events = loss if job.loses_decoders else ()
    replay = _together if job.setup == ONE else _apart
    names = "abc"[: job.zones]
    found = figures(job.setup, [replay(names, rows, seed, events) for seed in range(job.seeds)])
    return ZoneCell(job.zones, job.loses_decoders, found)


def _together(names: str, rows: Rows, seed: int, events: Sequence[TimetableEvent]) -> Summary:
    file = load_fleet(zoned(names, SLOWER, is_bound=True)).fleet
    result = whole(simulation_of(file, rows.delayed(seed), rows, seed, timetable=events))
    return summarize(result, OBJECTIVE, Places(file))


def _apart(names: str, rows: Rows, seed: int, events: Sequence[TimetableEvent]) -> Summary:
    all_zones = Result()
    delayed = rows.delayed(seed)
    for number, zone in enumerate(names):
        file = load_fleet(zoned(zone, SLOWER)).fleet
        own = events if zone == "a" else ()
        part = whole(simulation_of(file, delayed[number :: len(names)], rows, seed, timetable=own))
        all_zones.outcomes.extend(part.outcomes)
        all_zones.prefill_workers += part.prefill_workers
        all_zones.ended_s = max(all_zones.ended_s, part.ended_s)
    return summarize(all_zones, OBJECTIVE, Places(file))
