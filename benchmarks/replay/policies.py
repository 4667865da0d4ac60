"""Every policy over traces, loads and links, each with what did best on the first half of the rows.

Whoever runs a peer's router may keep KV in its zone, as ``required`` does, by a pool for each zone or a
filter. So a peer's rule is tried with its published values under no policy and under ``required``, and the
better of the two is tuned on: 12 points at most, as many as ours may have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.replay.cases import CASES, Cell, Tried, fleet, rows_of
from benchmarks.replay.replays import OBJECTIVE, figures, over_seeds, replayed
from kvrouter.core.workers import Role
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.comparison import crossing_gb
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.tuning import merit, points, second_half
from kvrouter.sim.replay.variant import OURS, Variant, variants
from kvrouter.sim.rules.registry import GRID_MAX, RULES

REQUIRED = "required"
TUNED = f"{OURS}, tuned"


class Entrant(NamedTuple):
    """A policy with its parameters, and the transfer policy of the fleet."""

    policy: str
    enforcement: str | None = None

    def __str__(self) -> str:
        return self.policy if self.enforcement is None else f"{self.policy}, {self.enforcement}"


class Job(msgspec.Struct, frozen=True):
    """One policy, in one case at one load, over all ratios of links."""

    case: int
    load: float
    policy: str
    ratios: tuple[float, ...]
    rows: int
    seeds: int

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        return f"{CASES[self.case].name}, {self.load:g} times as fast, {self.policy}"


OURS_UNTUNED = (Entrant(OURS), Entrant(OURS, "preferred"), Entrant(OURS, REQUIRED))
OURS_GRID = (
    *(Entrant(point) for point in points(OURS, (Role.PREFILL, Role.DECODE))),
    *OURS_UNTUNED[1:],
)


def jobs(rows: int, seeds: int, ratios: Sequence[float], cases: Sequence[int], n_loads: int) -> list[Job]:
    """Return (b): every policy in each of the cases, at the highest ``n_loads`` of its loads."""
    return [
        Job(case, load, policy, tuple(ratios), rows, seeds)
        for case in cases
        for load in CASES[case].loads[-n_loads:]
        for policy in (OURS, *RULES)
    ]


def published(rule: str) -> str:
    """Return a rule with its published values, spelled as in its grid."""
    known = RULES[rule]
    if not known.grid:
        return rule
    return points(rule)[[*known.grid].index(known.parameters)]


class Contest:
    """The replays of one job. What does not depend on the links between zones is replayed once for all."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = rows_of(CASES[job.case], job.load, job.rows)
        self._tried: dict[tuple[Entrant, float], Tried] = {}
        self._summaries: dict[tuple[Entrant, float], list[Summary]] = {}

    def cells(self) -> list[Cell]:
        """Replay the policy at every ratio of links."""
        found: list[Cell] = []
        for ratio in self._job.ratios:
            if self._job.policy == OURS:
                found += [self._cell(str(entrant), entrant, ratio) for entrant in OURS_UNTUNED]
                tried = self._try(OURS_GRID, ratio)
                best = self._best(OURS_GRID, ratio)
                found.append(self._cell(f"{TUNED}: {_parameters(best)}", best, ratio, tried))
            else:
                grid = self._grid(ratio)
                best = self._best(grid, ratio)
                found.append(self._cell(str(best), best, ratio, self._try(grid, ratio)))
        return found

    def _grid(self, ratio: float) -> list[Entrant]:
        """Return what a rule is chosen from: at most as many points as any may have."""
        rule = published(self._job.policy)
        both = [Entrant(rule), Entrant(rule, REQUIRED)]
        enforcement = self._best(both, ratio).enforcement
        others = [point for point in points(self._job.policy) if point != rule]
        return [*both, *(Entrant(point, enforcement) for point in others[: GRID_MAX - len(both)])]

    def _best(self, grid: Sequence[Entrant], ratio: float) -> Entrant:
        tried = dict(zip(grid, self._try(grid, ratio), strict=True))
        return min(grid, key=lambda entrant: (tried[entrant].failed, tried[entrant].ttft_ms))

    def _try(self, grid: Sequence[Entrant], ratio: float) -> tuple[Tried, ...]:
        """Replay the first half with each point of a grid."""
        for entrant in grid:
            key = (entrant, self._links(entrant, ratio))
            if key not in self._tried:
                variant = self._variant(*key)
                first = self._rows.rows[: self._rows.half]
                result = replayed(variant.fleet, first, self._rows, 0, rule=variant.make_rule())
                failed, ttft_s = merit(result.outcomes)
                self._tried[key] = Tried(str(entrant), failed, ttft_s * 1e3)
        return tuple(self._tried[entrant, self._links(entrant, ratio)] for entrant in grid)

    def _cell(self, name: str, entrant: Entrant, ratio: float, tried: tuple[Tried, ...] = ()) -> Cell:
        """Replay all rows with every seed; the figures are of the second half."""
        key = (entrant, self._links(entrant, ratio))
        if key not in self._summaries:
            variant = self._variant(*key)
            self._summaries[key] = over_seeds(lambda seed: self._summary(variant, seed), self._job.seeds)
        seen = self._summaries[key]
        return Cell(
            **figures(seen),
            policy=name,
            case=CASES[self._job.case].name,
            load=self._job.load,
            ratio=ratio,
            crossing_gb=tuple(map(crossing_gb, seen)),
            tried=tried,
        )

    def _summary(self, variant: Variant, seed: int) -> Summary:
        rows = self._rows
        result = replayed(variant.fleet, rows.rows, rows, seed, rule=variant.make_rule())
        places = Places(variant.fleet)
        return summarize(second_half(result, len(rows.rows), places), OBJECTIVE, places)

    def _links(self, entrant: Entrant, ratio: float) -> float:
        return self._job.ratios[0] if entrant.enforcement == REQUIRED else ratio

    def _variant(self, entrant: Entrant, ratio: float) -> Variant:
        document = fleet("ab", ratio, policy=entrant.enforcement)
        return variants(document, [entrant.policy], [])[0]


def _parameters(entrant: Entrant) -> str:
    return entrant.enforcement or entrant.policy.partition(":")[2]
