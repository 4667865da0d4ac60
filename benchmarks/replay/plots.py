"""Plots of the results, as SVG: bars in groups, of ours in a colour of their own."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from kvrouter.sim.replay.variant import OURS
from kvrouter.sim.report.document import shown

WIDTH_PX = 940
NAME_PX = 410
VALUE_PX = 90
BAR_PX = 14
LINE_PX = 20
LONGEST = 5.0
"""A bar is drawn up to so many times as long as the shortest of its group; a gap says that it goes on."""

OUR_COLOUR = "#2563eb"
PEERS_COLOUR = "#94a3b8"
TEXT_COLOUR = "#0f172a"


class Bar(NamedTuple):
    """One value, and what it is written as."""

    name: str
    value: float
    shown: str
    is_ours: bool = False


class Group(NamedTuple):
    """Bars with one scale."""

    title: str
    bars: Sequence[Bar]


def is_ours(policy: str) -> bool:
    """Whether a policy is this router's own."""
    return policy.partition(":")[0].partition(",")[0] == OURS


def plot(title: str, groups: Sequence[Group]) -> str:
    """Return an SVG document, which says ``title`` to those who do not see it."""
    parts: list[Markup] = []
    y = 0
    for group in groups:
        y += LINE_PX + 6
        parts.append(_text(0, y, group.title, weight="bold"))
        least = min((bar.value for bar in group.bars if bar.value > 0.0), default=1.0)
        most = max((bar.value for bar in group.bars), default=1.0)
        longest = min(most, LONGEST * least) or 1.0
        for bar in group.bars:
            y += LINE_PX
            parts += _bar(bar, y, longest)
    height = y + LINE_PX // 2
    return str(
        _element(
            "svg",
            _element("title", title),
            _element("rect", width=WIDTH_PX, height=height, fill="white"),
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH_PX} {height}",
            width=WIDTH_PX,
            height=height,
            role="img",
            font_family="sans-serif",
            font_size=12,
        )
    )


def _bar(bar: Bar, y: float, longest: float) -> list[Markup]:
    full_px = WIDTH_PX - NAME_PX - VALUE_PX
    width = full_px * min(bar.value, longest) / longest
    colour = OUR_COLOUR if bar.is_ours else PEERS_COLOUR
    found = [
        _text(NAME_PX - 8, y, bar.name, anchor="end"),
        _element("rect", x=NAME_PX, y=y - BAR_PX + 3, width=width, height=BAR_PX, fill=colour),
        _text(NAME_PX + width + 6, y, bar.shown),
    ]
    if bar.value > longest:
        gap_x = NAME_PX + width - 14
        points = (
            f"{gap_x},{y + 3} {gap_x + 5},{y - BAR_PX + 3} {gap_x + 9},{y - BAR_PX + 3} {gap_x + 4},{y + 3}"
        )
        found.insert(2, _element("polygon", points=points, fill="white"))
    return found


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> Markup:
    return _element("text", text, x=x, y=y, text_anchor=anchor, font_weight=weight, fill=TEXT_COLOUR)


def _element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """An element whose children are escaped unless they are markup; ``font_size`` is its font-size."""
    name = Markup(tag)
    given = Markup().join(
        Markup(' {}="{}"').format(key.replace("_", "-"), shown(value)) for key, value in attributes.items()
    )
    return Markup("<{}{}>{}</{}>").format(
        name, given, Markup().join(escape(shown(each)) for each in children), name
    )
