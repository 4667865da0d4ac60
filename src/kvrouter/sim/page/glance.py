"""The main figures at a glance: a panel for each, with a bar for every variant and its interval."""

from collections.abc import Sequence
from typing import NamedTuple

from kvrouter.sim import comparison
from kvrouter.sim.comparison import Better, Column
from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.series import style
from kvrouter.sim.summary import Interval, VariantReport

LENGTH = 1_000
"""How long the longest bar is, in the units of its drawing."""

THICKNESS = 11

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


class _Bar(NamedTuple):
    """A variant's figure, and its text."""

    name: str
    style: str
    found: Interval
    text: str


def panels(variants: Sequence[VariantReport]) -> list[Markup]:
    """Return a panel for each figure that there is."""
    found = [_panel(variants, title, unit, column) for title, unit, column in _PANELS]
    return [panel for panel in found if panel is not None]


def _panel(variants: Sequence[VariantReport], title: str, unit: str, column: Column) -> Markup | None:
    """Bars of one figure; None where no variant has it, or where nothing crosses or costs anything."""
    rows: list[_Bar] = []
    for index, variant in enumerate(variants):
        interval = column.over(variant.summaries)
        if interval is not None:
            text = f"{column.shown(interval)} {unit}".rstrip()
            rows.append(_Bar(variant.name, style(index), interval, text))
    may_be_nothing = column in (comparison.CROSSING, comparison.COST)
    if not rows or (may_be_nothing and not any(row.found.mean for row in rows)):
        return None
    about = "lower is better" if column.better is Better.LOWER else "higher is better"
    mark = None
    if column is comparison.CACHED:
        ceilings = {comparison.CEILING.shown(comparison.CEILING.over(v.summaries)) for v in variants}
        ceiling = comparison.CEILING.over(variants[0].summaries)
        if len(ceilings) == 1 and ceiling is not None:
            about, mark = f"higher is better; the line is the ceiling, {ceiling.mean:.1f} %", ceiling.mean
    whole = 100.0 if unit == "%" else None
    caption = element("figcaption", element("h3", title), element("p", about, class_="about"))
    return element("figure", caption, _bars(rows, whole=whole, mark=mark))


def _bars(found: Sequence[_Bar], *, whole: float | None = None, mark: float | None = None) -> Markup:
    """Return the bars, from 0 to ``whole`` or else to the largest of them. A line stands at ``mark``."""
    longest = whole or max((bar.found.mean + bar.found.within for bar in found), default=0.0) or 1.0
    return element("div", *(_bar(bar, longest, mark) for bar in found), class_="bars")


def _bar(bar: _Bar, longest: float, mark: float | None) -> Markup:
    def at(value: float) -> float:
        return min(1.0, max(0.0, value / longest)) * LENGTH

    shapes = [
        element("rect", x=0, y=0, width=LENGTH, height=THICKNESS, class_="bar back"),
        element("rect", x=0, y=0, width=at(bar.found.mean), height=THICKNESS, class_="bar"),
    ]
    middle = THICKNESS / 2
    if bar.found.within:
        low, high = at(bar.found.mean - bar.found.within), at(bar.found.mean + bar.found.within)
        shapes += [
            element("line", x1=low, x2=high, y1=middle, y2=middle, class_=name)
            for name in ("halo", "whisker")
        ]
    if mark is not None:
        shapes.append(element("line", x1=at(mark), x2=at(mark), y1=0, y2=THICKNESS, class_="whisker"))
    return element(
        "div",
        element("div", element("span", bar.name), element("b", bar.text), class_="of"),
        element(
            "svg",
            *shapes,
            viewBox=f"0 0 {LENGTH} {THICKNESS}",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{bar.name}: {bar.text}",
        ),
        class_=bar.style,
    )
