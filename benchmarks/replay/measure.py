"""Replays of the cases: zones under one deployment or apart, and all policies over links and loads."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from benchmarks.replay.cases import CASES, RATIOS, Case, Cell, Figures, Rows, fleet
from kvrouter.config import FleetFile, load_fleet
from kvrouter.sim.dispatch import ByTimeStamp
from kvrouter.sim.places import Places
from kvrouter.sim.rules.registry import RULES
from kvrouter.sim.rules.rule import Rule
from kvrouter.sim.simulation import Result, Simulation
from kvrouter.sim.summary import Objective, Summary, summarize
from kvrouter.sim.timetable import DieEvent, TimetableEvent
from kvrouter.sim.traces.request import TraceRequest
from kvrouter.sim.tuning import candidates, merit
from kvrouter.sim.variant import OURS, Variant, variants

OBJECTIVE = Objective(ttft_s=2.0, itl_s=0.05)
ZONES = (2, 3)

OUR_POLICIES = (None, "preferred", "required")
"""Under these our router is compared; the rules of peers know no policy."""


class Job(msgspec.Struct, frozen=True):
    """One policy, in one case at one load and ratio of links."""

    case: int
    load: float
    ratio: float
    policy: str
    enforcement: str | None
    tune: bool
    rows: int
    seeds: int


class ZoneCell(Figures, frozen=True, kw_only=True):
    """One deployment over all zones, or one for each behind a gateway that takes turns."""

    zones: int
    setup: str
    loses_decoders: bool
    ratio: float


def figures(rows: Sequence[Summary]) -> dict[str, Any]:
    """Return what :class:`Figures` has, of each seed."""
    return {
        "ttft_ms": tuple(row.ttft_ms.mean or 0.0 for row in rows),
        "ttft_p99_ms": tuple(row.ttft_ms.p99 or 0.0 for row in rows),
        "good": tuple(row.good_share for row in rows),
        "cached": tuple(row.cached_share for row in rows),
        "failed": tuple(sum(row.errors.values()) for row in rows),
    }


@lru_cache(maxsize=1)
def rows_of(case: Case, rows_max: int) -> Rows:
    """Read a case's rows once in a process."""
    return Rows(case.path, rows_max)


def replayed(
    file: FleetFile,
    rows: Iterable[TraceRequest],
    piece_tokens: int,
    load: float,
    seed: int,
    *,
    rule: Rule | None = None,
    timetable: Sequence[TimetableEvent] = (),
) -> Result:
    """Replay once."""
    return Simulation(
        file,
        rows,
        config=file.router,
        dispatch=ByTimeStamp(load),
        piece_tokens=piece_tokens,
        rule=rule,
        seed=seed,
        timetable=timetable,
    ).run()


def jobs(rows: int, seeds: int, ratios: Sequence[float], cases: Sequence[int], n_loads: int) -> list[Job]:
    """Return (b): every policy, untuned and tuned where it has parameters, over links, loads and traces."""
    found: list[Job] = []
    for case in cases:
        for load in CASES[case].loads[-n_loads:]:
            for ratio in ratios:
                policies = [(OURS, enforcement, False) for enforcement in OUR_POLICIES]
                policies.append((OURS, None, True))
                policies += [(name, None, bool(rule.grid)) for name, rule in RULES.items()]
                found += [Job(case, load, ratio, *policy, rows, seeds) for policy in policies]
    return found


def cell(job: Job) -> Cell:
    """Replay a policy with every seed, on the second half of the rows."""
    case = CASES[job.case]
    rows = rows_of(case, job.rows)
    document = fleet("ab", job.ratio, policy=job.enforcement)
    half = len(rows.rows) // 2
    chosen = variants(document, [job.policy], [])[0]
    if job.tune:
        (tried,) = candidates(document, [job.policy], [])
        first = rows.rows[:half]
        chosen = min(tried, key=lambda variant: merit(_run(variant, first, rows, job.load, 0).outcomes))
    seen: list[Summary] = []
    for seed in range(job.seeds):
        result = _run(chosen, rows, rows, job.load, seed)
        result.outcomes = [outcome for outcome in result.outcomes if outcome.number >= half]
        seen.append(summarize(result, OBJECTIVE, Places(chosen.fleet)))
    name = chosen.name if job.enforcement is None else f"{chosen.name}, {job.enforcement}"
    return Cell(
        **figures(seen),
        policy=name,
        case=case.name,
        load=job.load,
        ratio=job.ratio,
        crossing_gb=tuple(
            sum(pair.bytes for pair in row.carried if pair.src != pair.dst) / 1e9 for row in seen
        ),
        is_tuned=job.tune,
    )


def _run(variant: Variant, rows: Iterable[TraceRequest], of: Rows, load: float, seed: int) -> Result:
    return replayed(variant.fleet, rows, of.info.piece_tokens, load, seed, rule=variant.make_rule())


def zone_cells(rows_max: int, seeds: int, tell: Callable[[str], None]) -> list[ZoneCell]:
    """Return (a): ``required`` in one deployment against a static split, with all decoders and without those
    of one zone from a third of the time on.
    """
    found: list[ZoneCell] = []
    rows = rows_of(CASES[0], rows_max)
    load = 2.0
    dies_s = rows.rows[len(rows.rows) // 3].at_s / load
    loss = (DieEvent(at_s=dies_s, group="decode-a"),)
    for n_zones in ZONES:
        names = "abc"[:n_zones]
        for ratio in RATIOS[-1:]:
            for events in (None, loss):
                for setup, split in (("one deployment, required", False), ("static split", True)):
                    tell(f"{n_zones} zones, {setup}")
                    summaries = [
                        _zones(names, ratio, rows, load, seed, events or (), split=split)
                        for seed in range(seeds)
                    ]
                    found.append(
                        ZoneCell(
                            **figures(summaries),
                            zones=n_zones,
                            setup=setup,
                            loses_decoders=events is not None,
                            ratio=ratio,
                        )
                    )
    return found


def _zones(
    names: str,
    ratio: float,
    rows: Rows,
    load: float,
    seed: int,
    events: Sequence[TimetableEvent],
    *,
    split: bool,
) -> Summary:
    pieces = rows.info.piece_tokens
    if not split:
        file = load_fleet(fleet(names, ratio, policy="required")).fleet
        return summarize(replayed(file, rows, pieces, load, seed, timetable=events), OBJECTIVE, Places(file))
    whole = Result()
    for number, zone in enumerate(names):
        file = load_fleet(fleet(zone, ratio, policy=None)).fleet
        part = replayed(
            file,
            rows.share(number, len(names)),
            pieces,
            load,
            seed,
            timetable=events if zone == "a" else (),
        )
        whole.outcomes += part.outcomes
        whole.ended_s = max(whole.ended_s, part.ended_s)
    return summarize(whole, OBJECTIVE, Places(file))
