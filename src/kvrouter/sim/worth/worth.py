"""The effect of another transfer policy: figures of two replays of the same requests, part by part.

A replay of one trace is one long observation. Its requests are cut into parts of equal number by the order of
their arrival, and the two replays are compared part by part, for intervals. Seeds change the random draws and
not the traffic, so each part is a mean over them.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvrouter.core.errors import ConfigError
from kvrouter.kernel.topology.link_table import BYTES_PER_GB
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.comparison import Better
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.percentiles import percentile
from kvrouter.sim.replay.summary import Objective
from kvrouter.sim.worth.paired import difference

PARTS = 10
"""How many parts the requests of a trace are cut into."""

PART_REQUESTS = 10
"""A part of fewer requests is no observation of a fleet."""

Floats = npt.NDArray[np.float64]


class Rows(NamedTuple):
    """One replay, request by request in the order of arrivals; ``ttft_ms`` is NaN where no token came."""

    ttft_ms: Floats
    good: Floats
    failed: Floats
    crossing_gb: Floats
    cost: Floats

    def part(self, begin: int, end: int) -> "Rows":
        """Return the requests from ``begin`` until before ``end``."""
        return Rows._make(column[begin:end] for column in self)

    def is_like(self, other: "Rows") -> bool:
        """Whether every request had the same figures."""
        return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self, other, strict=True))


def rows_of(outcomes: Outcomes, objective: Objective, places: Places) -> Rows:
    """Return a replay's requests by number."""
    table = outcomes.table()
    crossing = np.zeros(len(table))
    cost = np.zeros(len(table))
    for row, move in table.moves():
        moved = places.moved(move)
        cost[row] += moved.cost or 0.0
        if moved.crosses:
            crossing[row] += move.bytes / BYTES_PER_GB
    return Rows(
        ttft_ms=table.ttft_s * 1e3,
        good=objective.are_met(table).astype(np.float64),
        failed=table.failed.astype(np.float64),
        crossing_gb=crossing,
        cost=cost,
    )


class FigureName(StrEnum):
    """The figures that are compared."""

    TTFT_MEAN = "ttft_mean_ms"
    TTFT_P90 = "ttft_p90_ms"
    TTFT_P99 = "ttft_p99_ms"
    GOODPUT = "good_share"
    FAILED = "failed_share"
    CROSSING = "crossing_gb"
    COST = "cost"


class Figure(NamedTuple):
    """One figure, by requests of today's replay and of another; None where no request has it in both.

    A ``is_total`` figure of one part is as much as if all parts were like it.
    """

    name: FigureName
    better: Better
    of: Callable[[Rows, Rows], tuple[float, float] | None]
    is_total: bool = False


def _of_answered(
    figure: Callable[[Floats], float | None],
) -> Callable[[Rows, Rows], tuple[float, float] | None]:
    """Restrict a figure to the requests that were answered in both: refusals make no replay faster."""

    def of(today: Rows, other: Rows) -> tuple[float, float] | None:
        both = ~(np.isnan(today.ttft_ms) | np.isnan(other.ttft_ms))
        before, after = figure(today.ttft_ms[both]), figure(other.ttft_ms[both])
        return None if before is None or after is None else (before, after)

    return of


FIGURES = (
    Figure(
        FigureName.TTFT_MEAN, Better.LOWER, _of_answered(lambda ms: float(ms.mean()) if len(ms) else None)
    ),
    Figure(FigureName.TTFT_P90, Better.LOWER, _of_answered(lambda ms: percentile(ms, 90))),
    Figure(FigureName.TTFT_P99, Better.LOWER, _of_answered(lambda ms: percentile(ms, 99))),
    Figure(FigureName.GOODPUT, Better.HIGHER, lambda a, b: (float(a.good.mean()), float(b.good.mean()))),
    Figure(FigureName.FAILED, Better.LOWER, lambda a, b: (float(a.failed.mean()), float(b.failed.mean()))),
    Figure(
        FigureName.CROSSING,
        Better.LOWER,
        lambda a, b: (float(a.crossing_gb.sum()), float(b.crossing_gb.sum())),
        is_total=True,
    ),
    Figure(
        FigureName.COST,
        Better.LOWER,
        lambda a, b: (float(a.cost.sum()), float(b.cost.sum())),
        is_total=True,
    ),
)
"""The compared figures, from left to right."""

BETTER = {figure.name: figure.better for figure in FIGURES}
"""The better direction of each figure."""


class Change(msgspec.Struct, frozen=True):
    """How one figure changes against ``today``: a mean over ``parts``, which are the changes of each.

    The true change is closer to it than ``within`` with 95 % confidence, and those of all alternatives and
    of all figures that may decide are closer than ``within_all`` together.
    """

    today: float
    change: float
    within: float
    within_all: float
    parts: tuple[float, ...]

    @property
    def share(self) -> float | None:
        """The change as a share of today's figure; None if that is 0."""
        return self.change / abs(self.today) if self.today else None


Changes = dict[FigureName, Change]


def compared_figures(places: Places) -> tuple[Figure, ...]:
    """Return the figures that there are: without prices no cost."""
    return tuple(figure for figure in FIGURES if figure.name is not FigureName.COST or places.has_prices)


def figures_of(rows: Sequence[Rows], figures: Sequence[Figure]) -> dict[FigureName, float]:
    """Return the figures of replays that differ by their seed, as their mean; one that no request has is
    left out.
    """
    found: dict[FigureName, float] = {}
    for figure in figures:
        values = [pair[0] for each in rows if (pair := figure.of(each, each)) is not None]
        if values:
            found[figure.name] = sum(values) / len(values)
    return found


def changes_of(
    today: Sequence[Rows], other: Sequence[Rows], figures: Sequence[Figure], n_compared: int
) -> Changes:
    """Return how figures change from today's replays to another policy's, seed by seed and part by part.

    For a side with fewer seeds, its last one fills in. A figure in fewer than two parts is left out.
    ``n_compared`` is the number of changes for a choice.
    """
    n_seeds = max(len(today), len(other))
    pairs = [(today[min(at, len(today) - 1)], other[min(at, len(other) - 1)]) for at in range(n_seeds)]
    bounds = np.linspace(0, len(today[0].good), PARTS + 1).astype(int).tolist()
    found: Changes = {}
    for figure in figures:
        scale = float(PARTS) if figure.is_total else 1.0
        before: list[float] = []
        changes: list[float] = []
        for begin, end in pairwise(bounds):
            of_part = [figure.of(a.part(begin, end), b.part(begin, end)) for a, b in pairs]
            known = [pair for pair in of_part if pair is not None]
            if len(known) == n_seeds:
                before.append(scale * sum(a for a, _ in known) / n_seeds)
                changes.append(scale * sum(b - a for a, b in known) / n_seeds)
        spread = difference(changes, n_compared)
        if spread is not None:
            found[figure.name] = Change(
                sum(before) / len(before), spread.mean, spread.within, spread.within_all, tuple(changes)
            )
    return found


def check_length(n_rows: int) -> None:
    """Raise ConfigError for a trace with too few requests to compare parts of it."""
    if n_rows < PARTS * PART_REQUESTS:
        raise ConfigError(
            f"trace: it has {n_rows} requests; an interval needs {PARTS} parts of {PART_REQUESTS} at least",
            param="trace",
        )
