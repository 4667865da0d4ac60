"""The page of costs: ours by default against tuned rules, and which cost should be the default."""

from collections.abc import Sequence
from statistics import geometric_mean, median

from benchmarks.choice.aggregated import BLOCKS_RULE, KNOWING
from benchmarks.replay.cases import CASES
from benchmarks.replay.contest import Cell, Contest
from benchmarks.replay.fleets import HALF_SLOW
from benchmarks.replay.kept import Study
from benchmarks.replay.replays import Figures
from benchmarks.replay.table import HOW, joined, ratio, tables

OF_KNOWING = 1.05
"""Of workers of which half are slow: the mean TTFT over that of knowing it, at most."""


class CostStudy(Study, frozen=True, kw_only=True):
    """All that was measured in one run."""

    contests: tuple[Contest, ...]

    @property
    def cells(self) -> list[Cell]:
        """Those of workers of one speed."""
        return [each for found in self.contests for each in found.cells if each.job.kind != HALF_SLOW]

    @property
    def slow_cells(self) -> list[Cell]:
        """Those in which half of the workers are slow."""
        return [each for found in self.contests for each in found.cells if each.job.kind == HALF_SLOW]


def _of(cell: Cell, policy: str) -> Figures:
    return next(each for each in cell.figures if each.policy == policy)


def _of_blocks(cell: Cell) -> float:
    return ratio(cell.figures[0].ttft_ms, _of(cell, BLOCKS_RULE).ttft_ms).median


def default_of(study: CostStudy) -> str:
    """Return the cost that should be on by default: time, where on every trace the mean TTFT, in the
    geometric mean over all fleets and sizes of memory, is less than by blocks, and nothing more fails.
    """
    for cells in _by_trace(study.cells).values():
        if geometric_mean(map(_of_blocks, cells)) >= 1.0:
            return "blocks"
        if sum(median(cell.figures[0].failed) - median(_of(cell, BLOCKS_RULE).failed) for cell in cells) > 0:
            return "blocks"
    return "time"


def _by_trace(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(CASES[cell.job.case].name, []).append(cell)
    return found


def _default(study: CostStudy) -> list[str]:
    """What is on by default, and why."""
    lines = []
    for trace, cells in _by_trace(study.cells).items():
        ratios = [_of_blocks(cell) for cell in cells]
        pairs = [(cell.figures[0], _of(cell, BLOCKS_RULE)) for cell in cells]
        itl = [ratio(ours.itl_ms, blocks.itl_ms).median for ours, blocks in pairs]
        p99 = [ratio(ours.ttft_p99_ms, blocks.ttft_p99_ms).median for ours, blocks in pairs]
        shown = [trace, f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        lines.append(joined([*shown, f"{geometric_mean(p99):.2f}", f"{min(itl):.2f} to {max(itl):.2f}"]))
    worse = [
        f"{cell.job.key}, window {cell.window + 1} ({_of_blocks(cell):.2f})"
        for cell in study.cells
        if _of_blocks(cell) > 1.0
    ]
    return [
        "## What is on by default",
        "",
        f"`--router-cost {default_of(study)}`. Time is the default where on every trace its mean TTFT is "
        "less than by blocks, in the geometric mean over all fleets and sizes of memory, and nothing more "
        "fails. Time over blocks:",
        "",
        "| trace | mean TTFT | from, to | p99 TTFT | between tokens, from, to |",
        "|---|--:|--:|--:|--:|",
        *lines,
        "",
        f"It is slower to the first token in: {'; '.join(worse) or 'no case'}.",
        "",
    ]


def markdown(study: CostStudy) -> str:
    """Return the page."""
    text = [
        "# What the cost of time chooses",
        "",
        f"Written by `python -m benchmarks.choice --form {study.form}`: the first {study.rows:,} requests of "
        f"each of three windows of each trace, {study.seeds} seeds, each of which delays every request a "
        f"little, {study.origin}. All figures are in [results](results/{study.form}.json). Mock engines "
        "answer by a formula: the page compares rules, it predicts no fleet.",
        "",
        "8 or 16 aggregated workers, of which each has the named KV memory; of some fleets half take twice "
        "as long, and nobody announces it. The load is a share of what round-robin sustains with ample "
        "memory; traces and loads are those of [policies](../replay/README.md).",
        "",
        HOW,
        "",
        *tables(study.contests),
        *_default(study),
        "## Half of the workers at half speed",
        "",
        "*Knowing*: the same rule with every worker's speed given. Wanted: at most "
        f"{OF_KNOWING - 1:.0%} more than it; what is more stands in bold.",
        "",
        "| trace | window | default: TTFT mean ms | p99 | knowing: mean | p99 | default / knowing |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *map(_slow_line, study.slow_cells),
        "",
    ]
    return "\n".join(text)


def _of_knowing(cell: Cell) -> float:
    return ratio(cell.figures[0].ttft_ms, _of(cell, KNOWING).ttft_ms).median


def _slow_line(cell: Cell) -> str:
    shown = [CASES[cell.job.case].name, str(cell.window + 1)]
    for each in (cell.figures[0], _of(cell, KNOWING)):
        shown += [f"{median(each.ttft_ms):,.0f}", f"{median(each.ttft_p99_ms):,.0f}"]
    of_knowing = _of_knowing(cell)
    return joined([*shown, f"**{of_knowing:.3f}**" if of_knowing > OF_KNOWING else f"{of_knowing:.3f}"])
