"""The main figures at a glance: a panel for each, with a bar for every variant and its interval."""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from kvrouter.sim.replay import comparison
from kvrouter.sim.replay.comparison import Better, Column
from kvrouter.sim.replay.summary import Interval, VariantReport
from kvrouter.sim.report.series import style

LENGTH = 1_000
"""How long the longest bar is, in the units of its drawing."""

CUT_AT = 4.0
"""No bar is longer than so many times the median: others stay comparable where one collapsed."""

_PANELS = (
    ("Time to first token, mean", "ms", comparison.TTFT_MEAN),
    ("Time to first token, p99", "ms", comparison.TTFT_P99),
    ("Between tokens, mean", "ms", comparison.ITL_MEAN),
    ("Good requests", "%", comparison.GOOD),
    ("Cached prompt tokens", "%", comparison.CACHED),
    ("Imbalance", "", comparison.IMBALANCE),
    ("KV crossing domains", "GB", comparison.CROSSING),
    ("Cost of KV transfers", "", comparison.COST),
)


class Bar(NamedTuple):
    """A variant's figure as text, as a length, and where its interval begins and ends, if it has one. It is
    ``is_cut`` if it would be longer.
    """

    name: str
    style: str
    text: str
    length: float
    interval: tuple[float, float] | None
    is_cut: bool


class Panel(NamedTuple):
    """The bars of one figure, with a line at ``mark``."""

    title: str
    about: str
    bars: list[Bar]
    mark: float | None


def panels(variants: Sequence[VariantReport]) -> list[Panel]:
    """Return a panel for each figure with data."""
    found = [_panel(variants, title, unit, column) for title, unit, column in _PANELS]
    return [panel for panel in found if panel is not None]


def _panel(variants: Sequence[VariantReport], title: str, unit: str, column: Column) -> Panel | None:
    """Return the bars of one figure; None if no variant has it, or if no KV crosses or has a cost."""
    intervals = [column.over(variant.summaries) for variant in variants]
    known = [interval for interval in intervals if interval is not None]
    may_be_nothing = column in (comparison.CROSSING, comparison.COST)
    if not known or (may_be_nothing and not any(interval.mean for interval in known)):
        return None
    longest = 100.0 if unit == "%" else _longest(known)

    def at(value: float) -> float:
        return min(1.0, max(0.0, value / longest)) * LENGTH

    about, mark = "lower is better" if column.better is Better.LOWER else "higher is better", None
    if any(interval.mean > longest for interval in known):
        about = f"{about}; bars with a gap are cut, at {longest:,.{column.digits}f} {unit}".rstrip()
    if column is comparison.CACHED:
        ceilings = {comparison.CEILING.shown(v.summaries) for v in variants}
        ceiling = comparison.CEILING.over(variants[0].summaries)
        if len(ceilings) == 1 and ceiling is not None:
            about, mark = f"higher is better; the line is the ceiling, {ceiling.mean:.1f} %", at(ceiling.mean)
    bars = [
        Bar(
            variant.name,
            style(index),
            f"{column.shown(variant.summaries)} {unit}".rstrip(),
            at(found.mean),
            (at(found.mean - found.within), at(found.mean + found.within))
            if found.within and found.mean <= longest
            else None,
            is_cut=found.mean > longest,
        )
        for index, (variant, found) in enumerate(zip(variants, intervals, strict=True))
        if found is not None
    ]
    return Panel(title, about, bars, mark)


def _longest(known: Sequence[Interval]) -> float:
    """Return the figure of the longest bar: the largest with its interval, or what bars are cut at."""
    means = [interval.mean for interval in known if interval.mean > 0.0]
    if not means:
        return 1.0
    largest = max(interval.mean + interval.within for interval in known)
    return min(largest, CUT_AT * median_low(means))
