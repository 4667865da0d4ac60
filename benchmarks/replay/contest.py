"""Ours as it is by default, against every published rule tuned on the first window of a trace.

Whoever runs a peer's router may bind KV to a zone, a rack or a host, by a pool for each or a filter. So a
rule is tuned over that as over its own parameters, at 20 points at most.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple, TypeVar

import msgspec

from benchmarks.replay.cases import CASES, WINDOWS, Case, Rows, rows_of
from benchmarks.replay.fleets import LEVELS, MEMORY_TOKENS, Workers
from benchmarks.replay.replays import OBJECTIVE, Figures, figures, simulation_of, whole
from kvrouter.core.workers import Role
from kvrouter.settings.problems import Document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.summary import Summary, summarize
from kvrouter.sim.replay.tuning import merit, points, second_half
from kvrouter.sim.replay.variant import OURS, Setting, Variant, variants
from kvrouter.sim.rules.registry import RULES

POINTS_MAX = 20
KEPT = 4
"""One of so many points of the first half of the window is replayed over all of it."""

FINALISTS = 4
"""So many rules, the best of the first window, are judged on the others."""

REQUIRED, PREFERRED = "required", "preferred"
PREFERRED_WEIGHT = 0.85
TUNED = f"{OURS}, tuned"

ROUND_ROBIN = "round-robin"
SUSTAINED = 0.9
"""Round-robin sustains a load while this share of requests meets the objective."""

LEAST_LOAD = 1 / 64
LASTS_S = 10.0
"""A window comes no faster than in so many seconds, or all of it would be waiting before it is answered."""

CLOSED_LOAD = 3.0
"""In a closed loop think times are so many times shorter: its sessions wait for answers, so that they never
come faster than a fleet answers.
"""

Merit = tuple[int, float]


class Entrant(NamedTuple):
    """A policy with its parameters, and the transfer policy of the fleet."""

    policy: str
    enforcement: str | None = None
    level: str = ""

    def __str__(self) -> str:
        return self.policy if self.enforcement is None else f"{self.policy}, {self.enforcement} {self.level}"

    @property
    def setting(self) -> Setting:
        """The transfer policy, as the fleet file has it."""
        content: dict[str, object] | None = None
        if self.enforcement is not None:
            content = {"domain": self.level, "enforcement": self.enforcement}
            if self.enforcement == PREFERRED:
                content["preferred_weight"] = PREFERRED_WEIGHT
        return Setting("kv_transfer", (content,))


FREE = (None, "")
BOUND = tuple((REQUIRED, level) for level in LEVELS)
NEAR = tuple((PREFERRED, level) for level in LEVELS)
"""``preferred`` makes what is far dearer in our own costs; it changes no choice of a published rule."""


class Job(msgspec.Struct, frozen=True):
    """One trace over one fleet at one load, which is a share of what round-robin sustains there with ample
    memory.
    """

    case: int
    kind: str
    size: int
    memory_tokens: int
    share: float
    rows: int
    seeds: int

    @property
    def key(self) -> str:
        """What it is called; no two of a run are called the same."""
        return f"{CASES[self.case].name}, {self.size} {self.kind}, {self.memory}, load {self.share:g}"

    @property
    def memory(self) -> str:
        """The KV memory of a worker, in thousands of tokens."""
        return f"{self.memory_tokens // 1024}k tokens"

    @property
    def workers(self) -> Workers:
        """What the fleet is made of."""
        return Workers(self.kind, self.size, CASES[self.case].block, self.memory_tokens)


class Tuned(msgspec.Struct, frozen=True):
    """The best point of a rule, over the whole first window, and how many were tried."""

    policy: str
    failed: int
    ttft_ms: float
    points: int

    @property
    def rule(self) -> str:
        """The rule without its parameters."""
        return self.policy.partition(":")[0].partition(",")[0]


class Cell(msgspec.Struct, frozen=True):
    """One window that judges: ours first, as it is by default, then ours otherwise, then the best rules."""

    job: Job
    window: int
    load: float
    figures: tuple[Figures, ...]


class Contest(msgspec.Struct, frozen=True):
    """What came of a job: every rule, tuned, and what the best of them do in the other windows."""

    tuned: tuple[Tuned, ...]
    cells: tuple[Cell, ...]


AnyFigures = TypeVar("AnyFigures", bound=Figures)


class Replays:
    """The replays of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.case = CASES[job.case]
        ample = job.workers._replace(memory_tokens=MEMORY_TOKENS)
        self.load = load_of(job.case, ample, job.share, job.rows)
        self._document = job.workers.document()

    def rows(self, window: int) -> Rows:
        """The rows of a window."""
        return rows_of(self.case, self.load, self.job.rows, window, copies(self.case, self.job.workers))

    def variant(self, entrant: Entrant) -> Variant:
        """A policy over the fleet, with its transfer policy."""
        (found,) = variants(self._document, [entrant.policy], [entrant.setting])
        return found

    def merit(self, entrant: Entrant, *, is_half: bool) -> Merit:
        """What a point is chosen by: failures, and the mean TTFT, of the first half of the window or of its
        second.
        """
        rows, variant = self.rows(0), self.variant(entrant)
        trace = rows.delayed(0)
        simulation = simulation_of(
            variant.fleet, trace[: rows.half] if is_half else trace, rows, 0, rule=variant.make_rule()
        )
        result = whole(simulation)
        if not is_half:
            result = second_half(result, len(rows.rows), Places(variant.fleet))
        return merit(result.outcomes)

    def simulation(self, entrant: Entrant, window: int, seed: int) -> tuple[Simulation, Variant]:
        """One replay of a window."""
        rows, variant = self.rows(window), self.variant(entrant)
        simulation = simulation_of(variant.fleet, rows.delayed(seed), rows, seed, rule=variant.make_rule())
        return simulation, variant

    def figures(self, name: str, entrant: Entrant, window: int) -> Figures:
        """The figures of the second half of a window, with every seed."""
        summaries: list[Summary] = []
        for seed in range(self.job.seeds):
            simulation, variant = self.simulation(entrant, window, seed)
            places = Places(variant.fleet)
            result = second_half(whole(simulation), len(self.rows(window).rows), places)
            summaries.append(summarize(result, OBJECTIVE, places))
        return figures(name, summaries)


def contest(replays: Replays, ours: Sequence[str], grid: Sequence[str]) -> Contest:
    """Tune every rule, and ours over ``grid``; judge ``ours`` as given, ours tuned and the best rules."""
    is_paired = replays.job.workers.is_paired
    bound = BOUND if is_paired else ()
    own = tune(grid, [*bound, *NEAR] if is_paired else [], replays.merit)
    rules = sorted(
        (tune(rule_points(rule), bound, replays.merit) for rule in RULES), key=lambda each: each[1]
    )
    cells = []
    for window in range(1, WINDOWS):
        found = [replays.figures(policy, Entrant(policy), window) for policy in ours]
        found.append(replays.figures(TUNED, own[0], window))
        found += [replays.figures(str(entrant), entrant, window) for entrant, *_ in rules[:FINALISTS]]
        cells.append(Cell(replays.job, window, replays.load, tuple(found)))
    tuned = [
        Tuned(str(entrant), failed, ttft_s * 1e3, n_points)
        for entrant, (failed, ttft_s), n_points in (own, *rules)
    ]
    return Contest(tuple(tuned), tuple(cells))


def rule_points(rule: str) -> list[str]:
    """Return a rule with each point of its grid, its published values first."""
    known, found = RULES[rule], points(rule)
    if known.grid:
        found.insert(0, found.pop([*known.grid].index(known.parameters)))
    return found


def our_points() -> list[str]:
    """Return ours with each point of its grid for pairs, its default first."""
    return points(OURS, (Role.PREFILL, Role.DECODE))


def tune(
    policies: Sequence[str],
    bound: Sequence[tuple[str | None, str]],
    merit_of: Callable[..., Merit],
) -> tuple[Entrant, Merit, int]:
    """Return the best point, with its merit and the number of points. On the first half of the window the
    first of ``policies`` is tried free and ``bound``; then the others, as the better of these is; then the
    best of all under the other bounds. The best quarter is replayed over the whole window.
    """
    found: dict[Entrant, Merit] = {}

    def best_with(entrants: Sequence[Entrant]) -> Entrant:
        for entrant in entrants:
            if entrant not in found and len(found) < POINTS_MAX:
                found[entrant] = merit_of(entrant, is_half=True)
        return min(found, key=found.__getitem__)

    places = (FREE, *bound)
    best = best_with([Entrant(policies[0], *place) for place in places])
    best = best_with([Entrant(policy, best.enforcement, best.level) for policy in policies[1:]])
    best_with([Entrant(best.policy, *place) for place in places])
    finalists = sorted(found, key=found.__getitem__)[: -(-len(found) // KEPT)]
    over_all = {entrant: merit_of(entrant, is_half=False) for entrant in finalists}
    best = min(over_all, key=over_all.__getitem__)
    return best, over_all[best], len(found)


def best_of(rules: Sequence[AnyFigures]) -> AnyFigures:
    """Return the rule with the least mean TTFT, the median of seeds, of those under which fewest failed."""
    return min(rules, key=lambda each: (median(each.failed), median(each.ttft_ms)))


def copies(case: Case, workers: Workers) -> int:
    """Return how often each session of a closed loop comes, so that larger fleets have more of them."""
    return max(1, workers.size // 8) if case.is_closed else 1


def load_of(case: int, workers: Workers, share: float, rows_max: int) -> float:
    """Return the load that is so much of what round-robin sustains; a closed loop has its own."""
    return CLOSED_LOAD if CASES[case].is_closed else share * sustained(workers, case, rows_max)


@lru_cache(maxsize=8)
def sustained(workers: Workers, case: int, rows_max: int) -> float:
    """Return the load that round-robin sustains, to a tenth, with which the window lasts LASTS_S at least."""
    document = workers.document()

    def sustains(load: float) -> bool:
        summary = _round_robin(document, rows_of(CASES[case], load, rows_max))
        return summary.good_share >= SUSTAINED and not summary.errors

    most = rows_of(CASES[case], 1.0, rows_max).rows[-1].at_s / LASTS_S
    low = min(1.0, most)
    while low > LEAST_LOAD and not sustains(low):
        low /= 2
    high = 2 * low
    while high < most and sustains(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high > 1.1 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


def _round_robin(document: Document, rows: Rows) -> Summary:
    """Return the figures of round-robin over the second half of rows."""
    (variant,) = variants(document, [ROUND_ROBIN], [])
    places = Places(variant.fleet)
    result = whole(simulation_of(variant.fleet, rows.rows, rows, 0, rule=variant.make_rule()))
    return summarize(second_half(result, len(rows.rows), places), OBJECTIVE, places)
