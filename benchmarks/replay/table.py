"""The table of ours as it is by default, over the best tuned rule: where ours loses comes first, and the bars
that hold over all of it.
"""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from benchmarks.replay.cases import CASES
from benchmarks.replay.contest import FINALISTS, KEPT, POINTS_MAX, REQUIRED, Cell, Contest, best_of
from benchmarks.replay.fleets import LEVELS
from benchmarks.replay.replays import Figures
from kvrouter.sim.replay.variant import OURS

CLOSE = 1.01
CLOSE_SHARE = 0.85
WORST = 1.05
TAIL = 1.02
"""The bars: so close in so many cells, so far in none, and so much more of the rest, at most."""

HOW = (
    "Every published rule is tuned on the first of three windows of the trace, over its own parameters and, "
    "where prefill and decode workers are apart, over where KV is bound to (nothing, or `required` on "
    f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}; `preferred` changes no choice of a published rule): "
    f"{POINTS_MAX} points at most. Its published values come first, free and bound; then its other "
    "parameters, as the better of these is; then the best of them under the other bounds. This is on the "
    f"first half of the window; one in {KEPT} of the points is replayed over all of it, and its second half "
    f"decides. The {FINALISTS} best rules are judged on the other two windows, with the same seeds as ours, "
    "and the best of them there stands in the table. Ours is as it is by default: it is tuned to nothing, "
    "and given no policy. The first half of a window fills caches, figures are of its second half: the "
    "median of seeds, and from the least to the most. Ours / theirs is the median of the ratios of each "
    "seed; of five seeds the least and the most are its 94 % interval."
)


class Ratio(msgspec.Struct, frozen=True):
    """Ours over theirs, of each seed: the median, the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of each seed; what is 0 on both sides is equal."""
    found = [
        one / other if other else (1.0 if not one else float("inf"))
        for one, other in zip(ours, theirs, strict=True)
    ]
    return Ratio(median(found), min(found), max(found))


class Line(msgspec.Struct, frozen=True):
    """One cell as the table shows it."""

    cell: Cell
    ours: Figures
    best: Figures
    ttft: Ratio
    p99: Ratio
    itl: Ratio

    @property
    def more_failed(self) -> float:
        """How many more requests fail under ours."""
        return median(self.ours.failed) - median(self.best.failed)

    @property
    def is_close(self) -> bool:
        """Whether ours is as good as wanted."""
        return self.ttft.median <= CLOSE and self.more_failed <= 0

    def is_longer(self, tail: Ratio) -> bool:
        """Whether so much more of p99 or between tokens is not made up for by the mean TTFT."""
        return tail.median > TAIL and tail.median - 1.0 > 1.0 - self.ttft.median

    @property
    def loses(self) -> bool:
        """Whether ours is behind in the mean TTFT, or fails more, or misses a bar of the rest."""
        behind = self.ttft.median > 1.0 or self.more_failed > 0
        return behind or self.is_longer(self.p99) or self.is_longer(self.itl)


def line_of(cell: Cell) -> Line:
    """Compare a cell's default with its best published rule."""
    ours = cell.figures[0]
    best = best_of([each for each in cell.figures if not is_ours(each.policy)])
    return Line(
        cell,
        ours,
        best,
        ratio(ours.ttft_ms, best.ttft_ms),
        ratio(ours.ttft_p99_ms, best.ttft_p99_ms),
        ratio(ours.itl_ms, best.itl_ms),
    )


def bars(lines: Sequence[Line]) -> list[str]:
    """The bars over the whole table, with what was measured."""
    n_close = sum(line.is_close for line in lines)
    worst = max(lines, key=lambda line: line.ttft.median)
    p99, itl = (sum(line.is_longer(each(line)) for line in lines) for each in (_p99, _itl))
    n_failed = sum(line.more_failed > 0 for line in lines)
    found = [
        (
            f"mean TTFT within {CLOSE - 1:.0%} of the best tuned rule's in {CLOSE_SHARE:.0%} of cells",
            f"{n_close} of {len(lines)}: {n_close / len(lines):.1%}",
            n_close >= CLOSE_SHARE * len(lines),
        ),
        (
            f"nowhere more than {WORST - 1:.0%} above it",
            f"{worst.ttft.median - 1:+.1%}: {_where(worst.cell)}",
            all(line.ttft.median <= WORST for line in lines),
        ),
        ("nowhere more failed requests", f"{n_failed} cells", not n_failed),
        (
            f"p99 TTFT at most {TAIL - 1:.0%} above, where the mean is not less by as much",
            f"{p99} cells above",
            not p99,
        ),
        (
            f"time between tokens at most {TAIL - 1:.0%} above, where the mean TTFT is not less by as much",
            f"{itl} cells above",
            not itl,
        ),
    ]
    return [
        "| wanted of the default | measured | holds |",
        "|---|---|---|",
        *(joined([wanted, measured, "yes" if holds else "**no**"]) for wanted, measured, holds in found),
        "",
    ]


def _p99(line: Line) -> Ratio:
    return line.p99


def _itl(line: Line) -> Ratio:
    return line.itl


def _header(others: Sequence[str]) -> list[str]:
    columns = ["trace", "window", "fleet", "memory", "load", "default: TTFT mean ms", "ITL ms", "best rule"]
    columns += ["TTFT mean ms", "ITL ms", "ours / theirs: TTFT mean", "p99", "ITL", *map(_short, others)]
    return [joined(columns), "|---|--:|---|--:|--:|--:|--:|---|" + "--:|" * (len(columns) - 8)]


def _short(policy: str) -> str:
    return f"{policy.rpartition('=')[2].removeprefix(f'{OURS}, ')} / theirs"


def tables(contests: Sequence[Contest]) -> list[str]:
    """The bars, and the cells: those in which ours loses first, the worst of them at the top."""
    lines = [line_of(cell) for contest in contests for cell in contest.cells]
    lost = sorted((line for line in lines if line.loses), key=lambda line: -line.ttft.median)
    rest = [line for line in lines if not line.loses]
    others = [
        each.policy
        for each in lines[0].cell.figures[1:]
        if is_ours(each.policy) and all(_of(line, each.policy) for line in lines)
    ]
    header = _header(others)
    return [
        "## Where ours loses",
        "",
        f"{len(lost)} of {len(lines)} cells: the mean TTFT is more than the best tuned rule's, or more "
        "requests fail, or p99 or the time between tokens is behind its bar (in bold).",
        "",
        *([*header, *(_line(line, others) for line in lost)] if lost else ["Nowhere."]),
        "",
        "## Bars over the whole table",
        "",
        *bars(lines),
        "What bounds those that do not hold: [the bars of both pages]"
        "(../../docs/decisions/0018-what-replays-of-choices-show.md#against-the-best-tuned-rule).",
        "",
        "## The other cells",
        "",
        *([*header, *(_line(line, others) for line in rest)] if rest else ["None."]),
        "",
        "## All rules, tuned, on the first window",
        "",
        "How often a rule had the least mean TTFT of the published ones where it was tuned (ours: as little "
        "as that), how many times as much it had, and what KV was bound to.",
        "",
        *_rules(contests),
    ]


def is_ours(policy: str) -> bool:
    """Whether a policy is this router's own."""
    return policy.partition(":")[0].partition(",")[0] == OURS


def _of(line: Line, policy: str) -> Figures | None:
    return next((each for each in line.cell.figures if each.policy == policy), None)


def _line(line: Line, others: Sequence[str]) -> str:
    job = line.cell.job
    tails = [f"**{each}**" if line.is_longer(each) else f"{each.median:.3f}" for each in (line.p99, line.itl)]
    of_others = [figures for policy in others if (figures := _of(line, policy)) is not None]
    return joined(
        [
            CASES[job.case].name,
            str(line.cell.window + 1),
            f"{job.size} {job.kind}",
            job.memory,
            f"{job.share:g} ({line.cell.load:,.1f} ×)",
            _median(line.ours.ttft_ms) + _failed(line.ours),
            f"{median(line.ours.itl_ms):.1f}",
            line.best.policy + _failed(line.best),
            _median(line.best.ttft_ms),
            f"{median(line.best.itl_ms):.1f}",
            str(line.ttft),
            *tails,
            *(f"{ratio(each.ttft_ms, line.best.ttft_ms).median:.3f}" for each in of_others),
        ]
    )


def _rules(contests: Sequence[Contest]) -> list[str]:
    by_rule: dict[str, list[tuple[float, str]]] = {}
    for contest in contests:
        peers = [each for each in contest.tuned if each.rule != OURS]
        least = min(peers, key=lambda each: (each.failed, each.ttft_ms))
        for each in contest.tuned:
            times = each.ttft_ms / least.ttft_ms if each.failed <= least.failed else float("inf")
            by_rule.setdefault(each.rule, []).append((times, each.policy.rpartition(", ")[2]))
    rows = []
    for rule, found in by_rule.items():
        over = [times for times, _ in found]
        bounds = [sum(bound == f"{REQUIRED} {level}" for _, bound in found) for level in LEVELS]
        first = sum(times <= 1.0 for times in over)
        cells = [f"{rule}, tuned" if rule == OURS else rule, str(first)]
        cells += [f"{median(over):.2f}", f"{max(over):,.2f}", *map(str, bounds)]
        rows.append((-first, median(over), joined(cells)))
    columns = ["rule", f"best of {len(contests)}", "median ×", "worst ×"]
    columns += [f"{REQUIRED} {level}" for level in LEVELS]
    return [
        joined(columns),
        "|---|" + "--:|" * (len(columns) - 1),
        *(row for *_, row in sorted(rows)),
        "",
    ]


def _where(cell: Cell) -> str:
    return f"{cell.job.key}, window {cell.window + 1}"


def _median(values: Sequence[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _failed(figures: Figures) -> str:
    failed = median(figures.failed)
    return f", {failed:g} failed" if failed else ""


def joined(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cells) + " |"
