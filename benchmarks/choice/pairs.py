"""Prefill and decode workers: links that differ and links that are alike, given, learned, failing and priced;
and prompts that a decode worker prefills for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from benchmarks.choice.aggregated import BLOCKS_RULE, TIME
from benchmarks.replay.cases import CASES, Rows, rows_of
from benchmarks.replay.contest import copies, load_of
from benchmarks.replay.fleets import AGGREGATED, SAME_LINKS, TIERS, Workers, tiers, zoned
from benchmarks.replay.replays import OBJECTIVE, Figures, simulation_of, values, whole
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.settings.problems import Document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.timetable import LinkEvent, TimetableEvent
from kvrouter.sim.replay.tuning import second_half
from kvrouter.sim.replay.variant import variants

HOSTS = 32
PRICE_WEIGHT = 8.0

FEW_SEEDS = 3
"""Of what has no bars."""

SHARES = (0.5, 0.8, 1.1)
"""Loads, of what round-robin sustains,"""

BAR_SHARE = 0.8
"""and the one that has bars."""

JOINT = f"{TIME},router_pd_selection=joint"
EVEN = f"{JOINT},router_decode_weight=16"
"""For those whom the time between tokens is worth more: fewer prompts stay where they are answered."""

PRICED = f"{JOINT},router_price_weight={PRICE_WEIGHT:g}"

LONG_PROMPTS = range(4)
"""The traces of the studies that are not of links in tiers."""

GIVEN, LEARNED, ASSUMED = "given", "learned", "assumed"
AT_ONCE, NEVER = "known at once", "never known"
LINKS = (GIVEN, LEARNED, ASSUMED, AT_ONCE, NEVER)
"""Of the fleet file's links: given, and learned on; not given, and learned; not given, and not learned;
given, and each change at once, without learning; given, and no change.
"""

FALLS_AT_S = 20.0
"""When a link falls to a tenth,"""

SHIFTED_S = 5.0
"""and so long after it traffic must have shifted."""


class PairFigures(Figures, frozen=True, kw_only=True):
    """One policy in one case, of the second half of the rows; a value for each seed."""

    links: str
    """What the router knows of links, one of LINKS; ``aggregated`` where there are none."""
    cost: tuple[float, ...]
    """What KV over links that have a price cost."""


class PairCell(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one trace over one fleet at one load, in requests a second of the trace's own."""

    study: str
    case: int
    fleet: str
    share: float
    load: float
    figures: tuple[PairFigures, ...]

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        share = f", {self.share:g} of what round-robin sustains" if self.share else ""
        return f"{CASES[self.case].name}, {self.fleet}, {self.load:.3g} times as fast{share}"


class PairJob(msgspec.Struct, frozen=True):
    """One study of one trace."""

    study: str
    case: int
    fleet: str
    rows: int
    seeds: int

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        return f"{self.study}: {CASES[self.case].name}, {self.fleet}"


def jobs(rows: int, seeds: int, cases: Sequence[int]) -> list[PairJob]:
    """Return every study of pairs; those that take longest first."""
    links = [PairJob("links", case, fleet, rows, seeds) for case in cases for fleet in (TIERS, SAME_LINKS)]
    long_prompts = [case for case in cases if case in LONG_PROMPTS]
    falls = [PairJob("a link at a tenth", case, "two zones", rows, seeds) for case in long_prompts]
    prices = [PairJob("prices", case, SAME_LINKS, rows, seeds) for case in long_prompts]
    split = [PairJob("local prefill", case, "two zones", rows // 2, seeds) for case in long_prompts]
    return [*links, *falls, *prices, *split]


def measured(job: PairJob) -> list[PairCell]:
    """Replay one study."""
    study: Callable[[PairJob], list[PairCell]] = {
        "links": _links,
        "a link at a tenth": _falls,
        "prices": _prices,
        "local prefill": _split,
    }[job.study]
    return study(job)


class _Ran(NamedTuple):
    result: Result
    places: Places
    n_rows: int


class PairFleet(NamedTuple):
    """A fleet and a trace at one load. ``timetable`` is what happens, ``table`` what links are afterwards."""

    document: Document
    rows: Rows
    load: float
    timetable: tuple[TimetableEvent, ...] = ()
    table: LinkTable | None = None

    def run(self, policy: str, links: str, seed: int) -> _Ran:
        file = variants(self.document, [policy], [])[0].fleet
        rows = self.rows.delayed(seed)
        simulation = simulation_of(file, rows, self.rows, seed, timetable=self.timetable)
        placer = simulation.fleet.placer
        if links in (LEARNED, ASSUMED):
            placer.set_routing(
                structs.replace(placer.settings, links=LinkTable(assumes_otherwise=True)), now_s=0.0
            )
        if links not in (GIVEN, LEARNED):
            _learn_nothing(placer)
        if links == AT_ONCE and self.table is not None:
            _give_at(placer, self.table, FALLS_AT_S)
        return _Ran(whole(simulation), Places(file), len(rows))

    def summary(self, policy: str, links: str, seed: int) -> Summary:
        ran = self.run(policy, links, seed)
        return summarize(second_half(ran.result, ran.n_rows, ran.places), OBJECTIVE, ran.places)

    def figures(self, policy: str, links: str, seeds: int) -> PairFigures:
        return _figures(policy, links, seeds, lambda seed: self.summary(policy, links, seed))


def _learn_nothing(placer: Placer) -> None:
    def refresh(*_: object, **__: object) -> None:
        """What arrives changes nothing."""

    placer.transfers.refresh = refresh  # type: ignore[method-assign]


def _give_at(placer: Placer, table: LinkTable, at_s: float) -> None:
    place = placer.place

    def knowing(request: Any, draw: Any, *, now_s: float, on_picked: Any = None) -> Any:
        if now_s >= at_s and placer.settings.links is not table:
            placer.set_routing(structs.replace(placer.settings, links=table), now_s=now_s)
        return place(request, draw, now_s=now_s, on_picked=on_picked)

    placer.place = knowing  # type: ignore[method-assign]


def _figures(policy: str, links: str, seeds: int, replay: Callable[[int], Summary]) -> PairFigures:
    seen = [replay(seed) for seed in range(seeds)]
    cost = tuple(summary.cost or 0.0 for summary in seen)
    return PairFigures(policy=policy, links=links, cost=cost, **values(seen))


def _links(job: PairJob) -> list[PairCell]:
    workers = Workers(job.fleet, HOSTS, CASES[job.case].block)
    few = min(job.seeds, FEW_SEEDS)
    cells = []
    for share in [BAR_SHARE] if CASES[job.case].is_closed else SHARES:
        on = _at(job, workers.document(), workers, share)
        if share == BAR_SHARE:
            asked = [(JOINT, GIVEN, job.seeds), *((policy, GIVEN, few) for policy in (BLOCKS_RULE, EVEN))]
            asked += [(TIME, links, job.seeds) for links in (GIVEN, LEARNED, ASSUMED)]
            asked += [(JOINT, links, few) for links in (LEARNED, ASSUMED)]
        else:
            asked = [(policy, GIVEN, 1) for policy in (JOINT, TIME, BLOCKS_RULE)]
        cells.append(
            PairCell(
                study=job.study,
                case=job.case,
                fleet=job.fleet,
                share=share,
                load=on.load,
                figures=tuple(on.figures(*each) for each in asked),
            )
        )
    return cells


def _at(job: PairJob, document: Document, workers: Workers, share: float) -> "PairFleet":
    """A fleet at a share of what round-robin sustains; a closed loop has a pace of its own."""
    case = CASES[job.case]
    load = load_of(job.case, workers, share, job.rows)
    return PairFleet(document, rows_of(case, load, job.rows, copies=copies(case, workers)), load)


def _falls(job: PairJob) -> list[PairCell]:
    """KV within one of two zones travels at a tenth from one moment on."""
    document, load = zoned("ab", 1.0), 3.0
    table = link_table(variants(document, [TIME], [])[0].fleet)
    near = table.by_level["zone"]
    fallen = Link(near.latency_s, near.bandwidth_bytes_per_s / 10.0)
    on = PairFleet(
        document,
        rows_of(CASES[job.case], load, job.rows),
        load,
        (LinkEvent(at_s=FALLS_AT_S, between=("a", "a"), level="zone", bandwidth_factor=0.1),),
        LinkTable(table.by_level, table.otherwise, {("zone", "a", "a"): fallen}),
    )

    def shifted(policy: str, links: str, seed: int) -> Summary:
        ran = on.run(policy, links, seed)
        after = Outcomes()
        for outcome in ran.result.outcomes:
            if outcome.arrived_s >= FALLS_AT_S + SHIFTED_S:
                after.append(outcome)
        return summarize(replace(ran.result, outcomes=after), OBJECTIVE, ran.places)

    asked = [(policy, links) for policy in (JOINT, TIME) for links in (AT_ONCE, GIVEN, NEVER)]
    return [
        PairCell(
            study=job.study,
            case=job.case,
            fleet=job.fleet,
            share=0.0,
            load=load,
            figures=tuple(
                _figures(policy, links, job.seeds, lambda seed: shifted(policy, links, seed))  # noqa: B023
                for policy, links in asked
            ),
        )
    ]


def _prices(job: PairJob) -> list[PairCell]:
    """KV between zones has a price, over links that are alike."""
    workers = Workers(SAME_LINKS, HOSTS, CASES[job.case].block)
    on = _at(job, tiers(HOSTS, alike=True, priced=True, block=workers.block), workers, BAR_SHARE)
    figures = tuple(on.figures(policy, GIVEN, job.seeds) for policy in (JOINT, PRICED))
    return [
        PairCell(
            study=job.study, case=job.case, fleet=job.fleet, share=BAR_SHARE, load=on.load, figures=figures
        )
    ]


def _split(job: PairJob) -> list[PairCell]:
    """Prompts that are prefilled where they are answered, against none and all of them."""
    cells = []
    case = CASES[job.case]
    seeds = job.seeds if case.is_closed else min(job.seeds, FEW_SEEDS)  # agents' sessions have the bar
    for load in (1.0, 3.0, 5.0):
        rows = rows_of(case, load, job.rows)
        split, whole = (
            PairFleet(document, rows, load)
            for document in (zoned("ab", 1.0), Workers(AGGREGATED, 8).document())
        )
        figures = [split.figures(policy, GIVEN, seeds) for policy in (JOINT, TIME)]
        figures.append(structs.replace(whole.figures(TIME, GIVEN, seeds), links=AGGREGATED))
        cells.append(
            PairCell(
                study=job.study, case=job.case, fleet=job.fleet, share=0.0, load=load, figures=tuple(figures)
            )
        )
    return cells
