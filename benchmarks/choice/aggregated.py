"""Aggregated workers: memory that is ample and memory that is short, and workers of unlike speed."""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from benchmarks.replay.cases import CASES
from benchmarks.replay.contest import Contest, Entrant, Job, Replays, contest
from benchmarks.replay.fleets import AGGREGATED, HALF_SLOW, MEMORY_TOKENS, SLOWER
from kvrouter.kernel.placement.speeds import LearnedSpeeds
from kvrouter.kernel.routing.interface import Speeds
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.tuning import points
from kvrouter.sim.replay.variant import OURS, Variant

SIZES = (8, 16)
SCENES = (
    (MEMORY_TOKENS, 0.8),
    (MEMORY_TOKENS // 4, 0.8),
    (MEMORY_TOKENS // 8, 0.8),
    (MEMORY_TOKENS, 0.5),
)
"""The KV memory of a worker, and shares of the load that round-robin sustains where that is ample."""

TIME = f"{OURS}:router_cost=time"
BLOCKS_RULE = f"{OURS}:router_cost=blocks"
KNOWING = f"{OURS}, knowing every worker's speed"

GRID = (
    *points(OURS),
    *(f"{TIME},router_decode_weight={weight}" for weight in (2, 4, 32, 128)),
    *(f"{TIME},overlap_score_weight={weight}" for weight in (0.5, 2)),
    f"{OURS}:router_cost=lmetric",
)
"""What ours is tuned over, its default first."""


def jobs(rows: int, seeds: int, cases: Sequence[int], sizes: Sequence[int], n_scenes: int) -> list[Job]:
    """Return every contest of aggregated workers; those that take longest first. A closed loop has its own
    load, so one share is all of them.
    """
    plain = [
        Job(case, AGGREGATED, size, memory, share, rows, seeds)
        for case in cases
        for size in sizes[::-1]
        for memory, share in SCENES[:n_scenes]
        if not CASES[case].is_closed or share == SCENES[0][1]
    ]
    return [*plain, *(Job(case, HALF_SLOW, SIZES[0], MEMORY_TOKENS, 0.5, rows, seeds) for case in cases)]


class KnownSpeeds(LearnedSpeeds):
    """Speeds that need not be learned: those of the fleet file, whose slow half comes last."""

    def speeds(self, n_slots: int, *, now_s: float) -> Speeds:
        """What is known."""
        learned = super().speeds(n_slots, now_s=now_s)
        slowness = np.where(np.arange(n_slots) < n_slots // 2, 1.0, SLOWER)
        return structs.replace(learned, slowness=slowness, decode_slowness=slowness)


class AggregatedReplays(Replays):
    """The replays of one job, with a policy that knows every worker's speed."""

    def simulation(self, entrant: Entrant, window: int, seed: int) -> tuple[Simulation, Variant]:
        """One replay of a window."""
        if entrant.policy != KNOWING:
            return super().simulation(entrant, window, seed)
        simulation, variant = super().simulation(Entrant(OURS), window, seed)
        learned = simulation.fleet.placer.learned
        learned.speeds = KnownSpeeds(simulation.fleet.placer.fleet, learned.speeds.events)
        return simulation, variant


def measured(job: Job) -> Contest:
    """Replay one job."""
    knowing = [KNOWING] if job.kind == HALF_SLOW else []
    return contest(AggregatedReplays(job), [OURS, BLOCKS_RULE, *knowing], GRID)
