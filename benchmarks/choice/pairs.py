"""Prefill and decode workers: links that differ and links that are alike, given, learned, failing and priced;
and prompts that a decode worker prefills for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import yaml
from msgspec import structs

from benchmarks.choice.aggregated import (
    FEW_SEEDS,
    FINALISTS,
    Figures,
    best_of,
    least,
    simulation_of,
    whole,
)
from benchmarks.replay.cases import BLOCK, BLOCKS, CASES, Rows, fleet, rows_of
from benchmarks.replay.replays import OBJECTIVE
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.settings.problems import Document, parse_document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.timetable import LinkEvent, TimetableEvent
from kvrouter.sim.replay.tuning import merit, points, second_half
from kvrouter.sim.replay.variant import OURS, variants
from kvrouter.sim.rules.registry import RULES

HOSTS = 32
"""Each has a prefill and a decode worker; 4 are a rack, 16 a zone."""

BANDWIDTHS = {"host": 50e9, "rack": 12.5e9, "zone": 6.25e9, "far": 2.5e9}
LATENCIES_S = {"host": 5e-5, "rack": 1e-4, "zone": 2e-4, "far": 1e-3}
ALIKE = Link(1e-4, 12.5e9)
KV_BYTES_PER_TOKEN = 262_144
PRICE_PER_GB = 0.02
PRICE_WEIGHT = 8.0

SHARES = (0.5, 0.8, 1.1)
"""Loads, of what round-robin sustains,"""

BAR_SHARE = 0.8
"""and the one that has bars."""

SUSTAINED = 0.9
"""Round-robin sustains a load while this share of requests meets the objective."""

BLOCKS_RULE = f"{OURS}:router_cost=blocks"
TIME = f"{OURS}:router_cost=time"
JOINT = f"{TIME},router_pd_selection=joint"
EVEN = f"{JOINT},router_decode_weight=16"
"""For those whom the time between tokens is worth more: fewer prompts stay where they are answered."""

PRICED = f"{JOINT},router_price_weight={PRICE_WEIGHT:g}"
ROUND_ROBIN = "round-robin"

GIVEN, LEARNED, ASSUMED = "given", "learned", "assumed"
AT_ONCE, NEVER = "known at once", "never known"
AGGREGATED = "aggregated"
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
    tiers = [PairJob("links", case, fleet, rows, seeds) for case in cases for fleet in ("tiers", "alike")]
    falls = [PairJob("a link at a tenth", case, "two zones", rows, seeds) for case in cases]
    prices = [PairJob("prices", case, "alike", rows, seeds) for case in cases]
    split = [PairJob("local prefill", case, "two zones", rows // 2, seeds) for case in cases]
    return [*tiers, *falls, *prices, *split]


def measured(job: PairJob) -> list[PairCell]:
    """Replay one study."""
    study: Callable[[PairJob], list[PairCell]] = {
        "links": _links,
        "a link at a tenth": _falls,
        "prices": _prices,
        "local prefill": _split,
    }[job.study]
    return study(job)


def tiers(*, alike: bool, priced: bool = False) -> Document:
    """Hosts in racks in two zones, with links as far apart as BANDWIDTHS, or all the same."""

    def link(tier: str) -> dict[str, float]:
        latency_s, bandwidth = LATENCIES_S[tier], BANDWIDTHS[tier]
        if alike:
            latency_s, bandwidth = ALIKE.latency_s, ALIKE.bandwidth_bytes_per_s
        price = {"price_per_gb": PRICE_PER_GB} if priced and tier == "far" else {}
        return {"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth, **price}

    engine = {"total_kv_blocks": BLOCKS, "kv_bytes_per_token": KV_BYTES_PER_TOKEN}
    content = {
        "version": 1,
        "models": [{"name": "m", "block_size": BLOCK, "context_length": 1_000_000}],
        "topology": {
            "levels": ["zone", "rack", "host"],
            "links": {
                "within": {level: link(level) for level in ("zone", "rack", "host")},
                "across": link("far"),
            },
        },
        "workers": [
            {
                "name": f"{role}-{host}",
                "role": role,
                "domains": {"zone": f"z{host // 16}", "rack": f"r{host // 4}", "host": f"h{host}"},
                "engine": engine,
            }
            for host in range(HOSTS)
            for role in ("prefill", "decode")
        ],
    }
    return parse_document(yaml.safe_dump(content), "tiers")


def aggregated() -> Document:
    """As many workers as in two zones of pairs, each for all of a request."""
    engine = {"total_kv_blocks": BLOCKS}
    content = {
        "version": 1,
        "models": [{"name": "m", "block_size": BLOCK, "context_length": 1_000_000}],
        "workers": [{"name": "worker", "role": "both", "replicas": 8, "engine": engine}],
    }
    return parse_document(yaml.safe_dump(content), "aggregated")


class _Ran(NamedTuple):
    result: Result
    places: Places
    n_rows: int


class _Fleet(NamedTuple):
    """A fleet and a trace at one load. ``timetable`` is what happens, ``table`` what links are afterwards."""

    document: Document
    rows: Rows
    timetable: tuple[TimetableEvent, ...] = ()
    table: LinkTable | None = None

    def run(self, policy: str, links: str, seed: int, *, is_half: bool = False) -> _Ran:
        variant = variants(self.document, [policy], [])[0]
        simulation = simulation_of(variant, self.rows, seed, is_half=is_half, timetable=self.timetable)
        placer = simulation.fleet.placer
        if links in (LEARNED, ASSUMED):
            placer.settings = structs.replace(placer.settings, links=LinkTable())
        if links not in (GIVEN, LEARNED):
            _learn_nothing(placer)
        if links == AT_ONCE and self.table is not None:
            _give_at(placer, self.table, FALLS_AT_S)
        n_rows = self.rows.half if is_half else len(self.rows.rows)
        return _Ran(whole(simulation), Places(variant.fleet), n_rows)

    def summary(self, policy: str, links: str, seed: int) -> Summary:
        ran = self.run(policy, links, seed)
        return summarize(second_half(ran.result, ran.n_rows, ran.places), OBJECTIVE, ran.places)

    def merit(self, policy: str) -> tuple[int, float]:
        return merit(self.run(policy, GIVEN, 0, is_half=True).result.outcomes)

    def figures(self, policy: str, links: str, seeds: int) -> PairFigures:
        return _figures(policy, links, seeds, lambda seed: self.summary(policy, links, seed))


def _learn_nothing(placer: Placer) -> None:
    def refresh(*_: object, **__: object) -> None:
        """What arrives changes nothing."""

    placer.transfers.refresh = refresh  # type: ignore[method-assign]


def _give_at(placer: Placer, table: LinkTable, at_s: float) -> None:
    place = placer.place

    def knowing(request: Any, draw: Any, *, now_s: float) -> Any:
        if now_s >= at_s and placer.settings.links is not table:
            placer.settings = structs.replace(placer.settings, links=table)
        return place(request, draw, now_s=now_s)

    placer.place = knowing  # type: ignore[method-assign]


def _figures(policy: str, links: str, seeds: int, replay: Callable[[int], Summary]) -> PairFigures:
    seen: list[tuple[float, float, float, float, int, float]] = []
    for seed in range(seeds):
        summary = replay(seed)
        seen.append(
            (
                summary.ttft_ms.mean or 0.0,
                summary.ttft_ms.p99 or 0.0,
                summary.itl_ms.mean or 0.0,
                summary.good_share,
                sum(summary.errors.values()),
                summary.cost or 0.0,
            )
        )
    ttft, p99, itl, good, failed, cost = zip(*seen, strict=True)
    return PairFigures(
        policy=policy,
        links=links,
        ttft_ms=ttft,
        ttft_p99_ms=p99,
        itl_ms=itl,
        good=good,
        failed=failed,
        cost=cost,
    )


def sustained(document: Document, case: int, rows: int) -> float:
    """Return the load that round-robin sustains, to a tenth: doubled, then halved in steps."""

    def sustains(load: float) -> bool:
        on = _Fleet(document, rows_of(CASES[case], load, rows))
        summary = on.summary(ROUND_ROBIN, GIVEN, 0)
        return summary.good_share >= SUSTAINED and not summary.errors

    low, high = 1.0, 2.0
    while sustains(high) and high < 4096.0:
        low, high = high, 2 * high
    while high > 1.1 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


def _links(job: PairJob) -> list[PairCell]:
    document = tiers(alike=job.fleet == "alike")
    most = sustained(document, job.case, job.rows)
    few = min(job.seeds, FEW_SEEDS)
    cells = []
    best = ROUND_ROBIN
    for share in sorted(SHARES, key=lambda share: share != BAR_SHARE):  # rules are tuned at the bars' load
        is_bar = share == BAR_SHARE
        on = _Fleet(document, rows_of(CASES[job.case], most * share, job.rows))
        if is_bar:
            tuned = [least(points(rule), on.merit) for rule in RULES]
            finalists = [policy for policy, _ in sorted(tuned, key=lambda found: found[1])[:FINALISTS]]
            best = best_of([on.figures(policy, GIVEN, few) for policy in finalists]).policy
            of_time = job.seeds if job.fleet == "tiers" else few
            asked = [(policy, GIVEN, job.seeds) for policy in (JOINT, best)]
            asked += [(policy, GIVEN, few) for policy in (BLOCKS_RULE, EVEN)]
            asked.append((TIME, GIVEN, of_time))
            asked += [(TIME, links, of_time) for links in (LEARNED, ASSUMED)]
            asked += [(JOINT, links, few) for links in (LEARNED, ASSUMED)]
        else:
            asked = [(policy, GIVEN, 1) for policy in (JOINT, TIME, BLOCKS_RULE, best)]
        cells.append(
            PairCell(
                study=job.study,
                case=job.case,
                fleet=job.fleet,
                share=share,
                load=most * share,
                figures=tuple(on.figures(*each) for each in asked),
            )
        )
    return sorted(cells, key=lambda cell: cell.share)


def _falls(job: PairJob) -> list[PairCell]:
    """KV within one of two zones travels at a tenth from one moment on."""
    document, load = fleet("ab", 1.0, policy=None), 3.0
    table = link_table(variants(document, [TIME], [])[0].fleet)
    near = table.by_level["zone"]
    fallen = Link(near.latency_s, near.bandwidth_bytes_per_s / 10.0)
    on = _Fleet(
        document,
        rows_of(CASES[job.case], load, job.rows),
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
    document = tiers(alike=True, priced=True)
    load = BAR_SHARE * sustained(document, job.case, job.rows)
    on = _Fleet(document, rows_of(CASES[job.case], load, job.rows))
    figures = tuple(on.figures(policy, GIVEN, job.seeds) for policy in (JOINT, PRICED))
    return [
        PairCell(study=job.study, case=job.case, fleet=job.fleet, share=BAR_SHARE, load=load, figures=figures)
    ]


def _split(job: PairJob) -> list[PairCell]:
    """Prompts that are prefilled where they are answered, against none and all of them."""
    cells = []
    case = CASES[job.case]
    seeds = job.seeds if case.is_closed else min(job.seeds, FEW_SEEDS)  # agents' sessions have the bar
    for load in (1.0, 3.0, 5.0):
        rows = rows_of(case, load, job.rows)
        split, whole = _Fleet(fleet("ab", 1.0, policy=None), rows), _Fleet(aggregated(), rows)
        figures = [split.figures(policy, GIVEN, seeds) for policy in (JOINT, TIME)]
        figures.append(structs.replace(whole.figures(TIME, GIVEN, seeds), links=AGGREGATED))
        cells.append(
            PairCell(
                study=job.study, case=job.case, fleet=job.fleet, share=0.0, load=load, figures=tuple(figures)
            )
        )
    return cells
