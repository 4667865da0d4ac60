"""The page of the results: each bar with what was measured, and which of them do not hold."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean, mean

import msgspec

from benchmarks.choice.aggregated import (
    BLOCKS,
    BLOCKS_RULE,
    FEW_SEEDS,
    KNOWING,
    TIME,
    Cell,
    Figures,
    Job,
    best_of,
)
from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.cases import CASES, LATE_S
from kvrouter.sim.replay.variant import OURS

OF_BLOCKS = 0.75
"""On the conversation trace at 3 times its speed: the mean TTFT by time over that by blocks, at most."""

SHORT_MEMORY = 1.02
OF_KNOWING = 1.05


class Study(msgspec.Struct, frozen=True):
    """All that was measured in one run."""

    form: str
    measured_at: str
    commit: Commit
    machine: Machine
    rows: int
    seeds: int
    cells: tuple[Cell, ...]
    frontier: tuple[Cell, ...] = ()
    """Those in which a bar does not hold, with other settings."""


class Row(msgspec.Struct, frozen=True):
    """One cell as the page shows it. ``missed`` names the bars that do not hold there."""

    cell: Cell
    ours: Figures
    blocks: Figures
    best: Figures
    knowing: Figures | None
    missed: tuple[str, ...]


def row_of(cell: Cell) -> Row:
    """Compare a cell with its bars."""
    by_policy = {figures.policy: figures for figures in cell.figures}
    ours, blocks = by_policy[TIME], by_policy[BLOCKS_RULE]
    best = best_of(each for name, each in by_policy.items() if name not in (TIME, BLOCKS_RULE, KNOWING))
    knowing = by_policy.get(KNOWING)
    return Row(cell, ours, blocks, best, knowing, tuple(_missed(cell.job, ours, blocks, best, knowing)))


def _missed(
    job: Job, ours: Figures, blocks: Figures, best: Figures, knowing: Figures | None
) -> Iterator[str]:
    """Yield the bars that do not hold."""
    bars: list[tuple[str, Sequence[float], Sequence[float], float]] = []
    if knowing is not None:
        bars.append(("mean TTFT of knowing", ours.ttft_ms, knowing.ttft_ms, OF_KNOWING))
    elif job.blocks == BLOCKS[0]:
        bars.append(("mean TTFT of the best rule", ours.ttft_ms, best.ttft_ms, 1.0))
        bars.append(("p99 TTFT of blocks", ours.ttft_p99_ms, blocks.ttft_p99_ms, 1.0))
        bars.append(("mean ITL of blocks", ours.itl_ms, blocks.itl_ms, 1.0))
        if CASES[job.case].name == "conversation" and job.load == 3.0:
            bars.append(("mean TTFT of blocks", ours.ttft_ms, blocks.ttft_ms, OF_BLOCKS))
    else:
        bars.append(("mean TTFT of the best rule", ours.ttft_ms, best.ttft_ms, SHORT_MEMORY))
        bars.append(("p99 TTFT of the best rule", ours.ttft_p99_ms, best.ttft_p99_ms, SHORT_MEMORY))
    for what, seen, bar, most in bars:
        ratio = round(mean(seen) / mean(bar), 3)
        if ratio > most:
            yield f"{what} {ratio:.3f}, wanted {most:g}"
    if mean(ours.failed) > mean(best.failed):
        yield f"{mean(ours.failed):.0f} failed, {mean(best.failed):.0f} under the best rule"


def default_of(study: Study) -> str:
    """Return the cost that should be on by default: time, where on every trace the mean TTFT, in the
    geometric mean over all loads and sizes of memory, is less than by blocks, and nothing more fails.
    """
    rows = [row for row in map(row_of, study.cells) if not row.cell.job.half_is_slow]
    for trace in {row.cell.job.case for row in rows}:
        of_trace = [row for row in rows if row.cell.job.case == trace]
        if geometric_mean(map(_of_blocks, of_trace)) >= 1.0:
            return "blocks"
        if sum(mean(row.ours.failed) - mean(row.blocks.failed) for row in of_trace) > 0:
            return "blocks"
    return "time"


def _of_blocks(row: Row) -> float:
    return mean(row.ours.ttft_ms) / mean(row.blocks.ttft_ms)


def _default(study: Study, rows: Sequence[Row]) -> list[str]:
    """What is on by default, and why."""
    lines = []
    for trace in sorted({row.cell.job.case for row in rows}):
        of_trace = [row for row in rows if row.cell.job.case == trace]
        ratios = list(map(_of_blocks, of_trace))
        itl = [mean(row.ours.itl_ms) / mean(row.blocks.itl_ms) for row in of_trace]
        p99 = [mean(row.ours.ttft_p99_ms) / mean(row.blocks.ttft_p99_ms) for row in of_trace]
        cells = [
            CASES[trace].name,
            f"{geometric_mean(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        ]
        cells += [f"{geometric_mean(p99):.2f}", f"{min(itl):.2f} to {max(itl):.2f}"]
        lines.append(joined(cells))
    worse = [f"{row.cell.job.key} ({_of_blocks(row):.2f})" for row in rows if _of_blocks(row) > 1.0]
    return [
        "## What is on by default",
        "",
        f"`--router-cost {default_of(study)}`. Time is the default where on every trace its mean TTFT is "
        "less than by blocks, in the geometric mean over all loads and sizes of memory, and nothing more "
        "fails. Time over blocks:",
        "",
        "| trace | mean TTFT | from, to | p99 TTFT | between tokens, from, to |",
        "|---|--:|--:|--:|--:|",
        *lines,
        "",
        f"It is slower to the first token in: {'; '.join(worse) or 'no case'}.",
        "",
    ]


def markdown(study: Study) -> str:
    """Return the page."""
    rows = [row_of(cell) for cell in study.cells]
    plain = [row for row in rows if not row.cell.job.half_is_slow]
    missed = [row for row in rows if row.missed]
    text = [
        "# What the cost of time chooses",
        "",
        f"Written by `python -m benchmarks.choice --form {study.form}`: the first {study.rows:,} requests of "
        f"each trace, {study.seeds} seeds, each of which delays every request by up to "
        f"{1e3 * LATE_S:g} ms, commit "
        f"{study.commit.id}{' with changes' * study.commit.changed}, "
        f"{study.machine.cpu}, {study.machine.cores} cores. All figures are in "
        f"[results](results/{study.form}.json). Mock engines answer by a formula: the page compares rules, "
        "it predicts no fleet.",
        "",
        "8 aggregated workers. Figures are of the second half of the requests. The best rule is the one with "
        "the least mean TTFT of the published ones, each with the parameters that did best on the first "
        "half, of 12 points at most; of the three best of the first half the best by "
        f"{FEW_SEEDS} seeds. `time` and `blocks` are kvrouter's costs as they are by default: nothing is "
        "tuned.",
        "",
        *_default(study, plain),
        "## Memory that is ample, and short",
        "",
        "| trace | load | blocks | time: TTFT mean ms | p99 | ITL | blocks rule: mean | p99 | ITL "
        "| best rule | mean | p99 | time / blocks | time / best |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|",
        *map(_line, plain),
        "",
        "## Half of the workers at half speed",
        "",
        "Nobody announces it. *Knowing*: the same rule with every worker's speed given.",
        "",
        "| trace | load | time: TTFT mean ms | p99 | knowing: mean | p99 | blocks rule: mean | best rule "
        "| mean | time / knowing |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|",
        *(_slow_line(row) for row in rows if row.cell.job.half_is_slow),
        "",
        "## Bars that do not hold",
        "",
        *([f"- {row.cell.job.key}: {'; '.join(row.missed)}" for row in missed] or ["All hold."]),
        "",
        *_frontier(study, missed),
    ]
    return "\n".join(text)


def _frontier(study: Study, missed: Sequence[Row]) -> list[str]:
    """What other settings do where a bar does not hold: those that no other one beats in everything."""
    of_job = {cell.job: cell for cell in study.frontier}
    lines, nowhere = [], []
    for row in missed:
        job, cell = row.cell.job, of_job.get(row.cell.job)
        if cell is None:
            continue
        ours = [row.ours, *cell.figures]
        holds = {each.policy: not [*_missed(job, each, row.blocks, row.best, row.knowing)] for each in ours}
        if not any(holds.values()):
            nowhere.append(job.key)
        for each in (row.best, *ours):
            if each is not row.best and any(_beats(other, each) for other in ours):
                continue
            setting = each.policy.removeprefix(f"{OURS}:").replace(",", ", ")
            ratios = [
                _ratio(each, row.best),
                f"{mean(each.ttft_p99_ms) / mean(row.best.ttft_p99_ms):.3f}",
                f"{mean(each.itl_ms) / mean(row.blocks.itl_ms):.3f}",
            ]
            lines.append(joined([job.key, f"`{setting}`", *ratios, "yes" * holds.get(each.policy, False)]))
    if not lines:
        return []
    return [
        "## Other settings there",
        "",
        f"{FEW_SEEDS} seeds each: after the best rule the default, and settings of kvrouter, those that no "
        "other one beats in mean TTFT, its p99 and ITL at once. *Holds*: all bars of that case.",
        "",
        "| case | setting | mean TTFT / best rule | p99 / best rule | ITL / blocks | holds |",
        "|---|---|--:|--:|--:|---|",
        *lines,
        "",
        f"No setting holds all bars of: {'; '.join(nowhere) or 'none of them'}.",
        "",
    ]


def _beats(one: Figures, other: Figures) -> bool:
    """Whether one is better in something, and worse in nothing."""
    mine, others = ([mean(each.ttft_ms), mean(each.ttft_p99_ms), mean(each.itl_ms)] for each in (one, other))
    return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


def _line(row: Row) -> str:
    job = row.cell.job
    figures = (row.ours, row.blocks)
    cells = [CASES[job.case].name, f"{job.load:g}", str(job.blocks)]
    for each in figures:
        cells += [ms(each.ttft_ms), ms(each.ttft_p99_ms), f"{mean(each.itl_ms):.1f}"]
    cells += [row.best.policy, ms(row.best.ttft_ms), ms(row.best.ttft_p99_ms)]
    cells += [_ratio(row.ours, row.blocks), _ratio(row.ours, row.best)]
    return joined(cells)


def _slow_line(row: Row) -> str:
    job = row.cell.job
    knowing = next(figures for figures in row.cell.figures if figures.policy == KNOWING)
    cells = [CASES[job.case].name, f"{job.load:g}"]
    for each in (row.ours, knowing):
        cells += [ms(each.ttft_ms), ms(each.ttft_p99_ms)]
    cells += [ms(row.blocks.ttft_ms), row.best.policy, ms(row.best.ttft_ms), _ratio(row.ours, knowing)]
    return joined(cells)


def ms(values: Sequence[float]) -> str:
    """Return their mean, in whole milliseconds."""
    return f"{mean(values):,.0f}"


def _ratio(one: Figures, other: Figures) -> str:
    return f"{mean(one.ttft_ms) / mean(other.ttft_ms):.3f}"


def joined(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cells) + " |"
