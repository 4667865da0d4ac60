"""Aggregated workers: memory that is ample and memory that is short, and workers of unlike speed."""

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import yaml

from benchmarks.replay.cases import BLOCK, CASES, Rows, rows_of
from benchmarks.replay.replays import OBJECTIVE
from kvrouter.core.timing import Timing
from kvrouter.kernel.placement.speeds import LearnedSpeeds
from kvrouter.kernel.routing.interface import Speeds
from kvrouter.settings.problems import Document, parse_document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.dispatch import ByTimeStamp, ClosedLoop
from kvrouter.sim.replay.simulation import Result, Simulation
from kvrouter.sim.replay.summary import summarize
from kvrouter.sim.replay.timetable import TimetableEvent
from kvrouter.sim.replay.tuning import merit, points, second_half
from kvrouter.sim.replay.variant import OURS, Variant, variants
from kvrouter.sim.rules.registry import RULES

WORKERS = 8
LOADS = (1.0, 3.0, 5.0)
BLOCKS = (4096, 1024, 512)
SLOWER = 2.0
"""How many times as long the slow half of the workers takes."""

FINALISTS = 3
"""So many rules, the best of the first half of the rows, are replayed with FEW_SEEDS seeds, and the best of
them with all.
"""

FEW_SEEDS = 3

TIME = f"{OURS}:router_cost=time"
BLOCKS_RULE = f"{OURS}:router_cost=blocks"
KNOWING = "kvrouter that knows every worker's speed"

FRONTIER = (
    *(f"{TIME},router_decode_weight={weight}" for weight in (2, 4, 32, 128)),
    *(f"{TIME},overlap_score_weight={weight}" for weight in (0.5, 2)),
    f"{OURS}:router_cost=lmetric",
    *(f"{BLOCKS_RULE},overlap_score_weight={weight}" for weight in (4, 16)),
)
"""Other settings, where a bar does not hold."""


class Figures(msgspec.Struct, frozen=True):
    """One policy in one cell, of the second half of the rows; a value for each seed."""

    policy: str
    ttft_ms: tuple[float, ...]
    ttft_p99_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    good: tuple[float, ...]
    failed: tuple[int, ...]


AnyFigures = TypeVar("AnyFigures", bound=Figures)


class Job(msgspec.Struct, frozen=True):
    """One trace at one load over one fleet."""

    case: int
    load: float
    blocks: int
    half_is_slow: bool
    rows: int
    seeds: int

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        fleet = "half of the workers slow" if self.half_is_slow else f"{self.blocks} blocks"
        return f"{CASES[self.case].name}, {self.load:g} times as fast, {fleet}"


class Cell(msgspec.Struct, frozen=True):
    """What came of a job: ours by time and by blocks, and the best published rule."""

    job: Job
    figures: tuple[Figures, ...]


def jobs(rows: int, seeds: int, cases: Sequence[int], loads: Sequence[float]) -> list[Job]:
    """Return every cell of the aggregated bars; those that take longest first."""
    plain = [
        Job(case, load, blocks, False, rows, seeds) for case in cases for load in loads for blocks in BLOCKS
    ]
    slow = [Job(case, load, BLOCKS[0], True, rows, seeds) for case in cases for load in loads]
    return plain + slow


def fleet(job: Job) -> Document:
    """The fleet file of a job."""
    engine: dict[str, object] = {"total_kv_blocks": job.blocks}
    groups = [{"name": "worker", "role": "both", "replicas": WORKERS, "engine": engine}]
    if job.half_is_slow:
        usual = Timing()
        slower = {
            name: getattr(usual, name) * SLOWER
            for name in usual.__struct_fields__
            if getattr(usual, name) != 0.0
        }
        groups = [
            {"name": "fast", "role": "both", "replicas": WORKERS // 2, "engine": engine},
            {
                "name": "slow",
                "role": "both",
                "replicas": WORKERS // 2,
                "engine": {**engine, "timing": slower},
            },
        ]
    content = {
        "version": 1,
        "models": [{"name": "m", "block_size": BLOCK, "context_length": 1_000_000}],
        "workers": groups,
    }
    return parse_document(yaml.safe_dump(content), job.key)


class KnownSpeeds(LearnedSpeeds):
    """Speeds that need not be learned: those of the fleet file, whose slow half comes last."""

    def speeds(self, n_slots: int, *, now_s: float) -> Speeds:
        """What is known."""
        learned = super().speeds(n_slots, now_s=now_s)
        slowness = np.where(np.arange(n_slots) < WORKERS // 2, 1.0, SLOWER)
        return msgspec.structs.replace(learned, slowness=slowness, decode_slowness=slowness)


def simulation_of(
    variant: Variant, rows: Rows, seed: int, *, is_half: bool, timetable: Sequence[TimetableEvent] = ()
) -> Simulation:
    """Return the replay of all rows, or of their first half, over a variant's fleet, where the seed says how
    late each is.
    """
    delayed = rows.delayed(seed)
    return Simulation(
        variant.fleet,
        delayed[: rows.half] if is_half else delayed,
        config=variant.fleet.router,
        dispatch=ClosedLoop() if rows.is_closed else ByTimeStamp(),
        piece_tokens=rows.piece_tokens,
        rule=variant.make_rule(),
        seed=seed,
        timetable=timetable,
    )


def whole(simulation: Simulation) -> Result:
    """Return what comes of a replay; raise KeyboardInterrupt for one that was stopped."""
    result = simulation.run()
    if not result.is_whole:
        raise KeyboardInterrupt
    return result


class _Replays(NamedTuple):
    job: Job
    document: Document
    rows: Rows

    def run(self, policy: str, seed: int, *, is_half: bool = False) -> tuple[Result, Variant]:
        is_knowing = policy == KNOWING
        variant = variants(self.document, [TIME if is_knowing else policy], [])[0]
        simulation = simulation_of(variant, self.rows, seed, is_half=is_half)
        if is_knowing:
            learned = simulation.fleet.placer.learned
            learned.speeds = KnownSpeeds(simulation.fleet.placer.fleet, learned.speeds.events)
        return whole(simulation), variant

    def merit(self, policy: str) -> tuple[int, float]:
        return merit(self.run(policy, 0, is_half=True)[0].outcomes)

    def figures(self, policy: str, seeds: int) -> Figures:
        seen: list[tuple[float, float, float, float, int]] = []
        for seed in range(seeds):
            result, variant = self.run(policy, seed)
            places = Places(variant.fleet)
            summary = summarize(second_half(result, len(self.rows.rows), places), OBJECTIVE, places)
            seen.append(
                (
                    summary.ttft_ms.mean or 0.0,
                    summary.ttft_ms.p99 or 0.0,
                    summary.itl_ms.mean or 0.0,
                    summary.good_share,
                    sum(summary.errors.values()),
                )
            )
        ttft, p99, itl, good, failed = zip(*seen, strict=True)
        return Figures(policy, ttft, p99, itl, good, failed)


def measured(job: Job) -> Cell:
    """Replay one job."""
    replays = _Replays(job, fleet(job), rows_of(CASES[job.case], job.load, job.rows))
    ours = [TIME, BLOCKS_RULE, *([KNOWING] if job.half_is_slow else [])]
    tuned = [least(points(rule), replays.merit) for rule in RULES]
    finalists = [policy for policy, _ in sorted(tuned, key=lambda found: found[1])[:FINALISTS]]
    best = best_of([replays.figures(policy, min(job.seeds, FEW_SEEDS)) for policy in finalists])
    return Cell(job, tuple(replays.figures(policy, job.seeds) for policy in (*ours, best.policy)))


def frontier(job: Job) -> Cell:
    """Replay one job with other settings."""
    replays = _Replays(job, fleet(job), rows_of(CASES[job.case], job.load, job.rows))
    return Cell(job, tuple(replays.figures(policy, min(job.seeds, FEW_SEEDS)) for policy in FRONTIER))


def best_of(rules: Iterable[AnyFigures]) -> AnyFigures:
    """Return the rule with the least mean TTFT of those under which fewest requests failed."""
    return min(rules, key=lambda each: (mean(each.failed), mean(each.ttft_ms)))


def least(
    policies: Sequence[str], merit_of: Callable[[str], tuple[int, float]]
) -> tuple[str, tuple[int, float]]:
    """Return the policy of least merit, with it."""
    return min(((policy, merit_of(policy)) for policy in policies), key=lambda found: found[1])
