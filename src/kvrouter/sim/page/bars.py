"""One figure of every variant as bars, with its interval over seeds."""

from collections.abc import Sequence
from typing import NamedTuple

from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.summary import Interval

LENGTH = 1_000
"""How long the longest bar is, in the units of its drawing."""

THICKNESS = 11


class Bar(NamedTuple):
    """A variant's figure, and its text."""

    name: str
    style: str
    found: Interval
    text: str


def bars(found: Sequence[Bar], *, whole: float | None = None, mark: float | None = None) -> Markup:
    """Return the bars, from 0 to ``whole`` or else to the largest of them. A line stands at ``mark``."""
    longest = whole or max((bar.found.mean + bar.found.within for bar in found), default=0.0) or 1.0
    return element("div", *(_bar(bar, longest, mark) for bar in found), class_="bars")


def _bar(bar: Bar, longest: float, mark: float | None) -> Markup:
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
