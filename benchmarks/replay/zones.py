"""One deployment over all zones against one for each zone, with all decode workers and without one zone's."""

from collections.abc import Sequence

import msgspec

from benchmarks.replay.cases import CASES, RATIOS, Rows, ZoneCell, fleet, rows_of
from benchmarks.replay.replays import OBJECTIVE, figures, over_seeds, replayed
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.timetable import DieEvent, TimetableEvent

ZONES = (2, 3)
LOAD = 2.0
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


def zone_jobs(rows: int, seeds: int) -> list[ZoneJob]:
    """Return (a)."""
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
    names, ratio = "abc"[: job.zones], RATIOS[-1]
    return ZoneCell(
        **figures(over_seeds(lambda seed: replay(names, ratio, rows, seed, events), job.seeds)),
        zones=job.zones,
        setup=job.setup,
        loses_decoders=job.loses_decoders,
        ratio=ratio,
    )


def _together(names: str, ratio: float, rows: Rows, seed: int, events: Sequence[TimetableEvent]) -> Summary:
    file = load_fleet(fleet(names, ratio, policy="required")).fleet
    return summarize(replayed(file, rows.rows, rows, seed, timetable=events), OBJECTIVE, Places(file))


def _apart(names: str, ratio: float, rows: Rows, seed: int, events: Sequence[TimetableEvent]) -> Summary:
    whole = Result()
    for number, zone in enumerate(names):
        file = load_fleet(fleet(zone, ratio, policy=None)).fleet
        part = replayed(
            file, rows.share(number, len(names)), rows, seed, timetable=events if zone == "a" else ()
        )
        whole.outcomes.extend(part.outcomes)
        whole.prefill_workers += part.prefill_workers
        whole.ended_s = max(whole.ended_s, part.ended_s)
    return summarize(whole, OBJECTIVE, Places(file))
