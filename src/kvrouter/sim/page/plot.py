"""A plot with lines, as an SVG element that takes its colours from the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.scale import Scale

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 18, 28
DOT_RADIUS = 2.0
LABEL_CHAR_WIDTH = 6.6


class Point(NamedTuple):
    """A place in the units of the axes."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line in pieces, and the areas that its seeds cover. ``style`` is the class of its colour."""

    name: str
    style: str
    runs: Sequence[Sequence[Point]]
    bands: Sequence[Sequence[Point]] = ()


class Mark(NamedTuple):
    """A value of the horizontal axis that matters."""

    x: float
    label: str


class _MarkLabel(NamedTuple):
    """The text over one mark, or over several whose own would meet: from the first to the last. ``at`` is its
    middle.
    """

    first: str
    last: str
    at: float

    @property
    def text(self) -> str:
        return self.first if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def half(self) -> float:
        """Half of its width, about."""
        return len(self.text) * LABEL_CHAR_WIDTH / 2 + 2


def plot(label: str, x: Scale, y: Scale, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> Markup:
    """Return the plot; ``label`` says to who does not see it what it shows. The first line is on top, and
    ``marks`` are in the order of their values; those beyond the axis are left out.
    """
    return element(
        "svg",
        element("title", label),
        *_grid(x, y),
        *_marked(x, marks),
        *(_series(x, y, line) for line in reversed(lines)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
        class_="plot",
    )


def _place(x: Scale, y: Scale, point: Point) -> tuple[float, float]:
    return (
        LEFT + x.share(point.x) * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - y.share(point.y) * (HEIGHT - TOP - BOTTOM),
    )


def _path(x: Scale, y: Scale, points: Sequence[Point]) -> str:
    return "M" + "L".join("{:.1f} {:.1f}".format(*_place(x, y, point)) for point in points)


def _grid(x: Scale, y: Scale) -> list[Markup]:
    bottom = HEIGHT - BOTTOM
    found = [
        element("rect", x=LEFT, y=TOP, width=WIDTH - LEFT - RIGHT, height=bottom - TOP, class_="frame"),
    ]
    for tick in x.ticks:
        at, _ = _place(x, y, Point(tick.value, y.low))
        found.append(element("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid"))
        placed = "tick end" if x.share(tick.value) > 0.95 else "tick"
        found.append(element("text", tick.label, x=at, y=bottom + 18, class_=placed))
    for tick in y.ticks:
        _, at = _place(x, y, Point(x.low, tick.value))
        found.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        found.append(element("text", tick.label, x=LEFT - 7, y=at + 4, class_="tick end"))
    return found


def _marked(x: Scale, marks: Sequence[Mark]) -> list[Markup]:
    shapes: list[Markup] = []
    labels: list[_MarkLabel] = []
    for mark in marks:
        if not x.low <= mark.x <= x.high:
            continue
        at = LEFT + x.share(mark.x) * (WIDTH - LEFT - RIGHT)
        shapes.append(element("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark"))
        labels.append(_within(_MarkLabel(mark.label, mark.label, at)))
        while len(labels) > 1 and labels[-1].at - labels[-1].half < labels[-2].at + labels[-2].half:
            last, first = labels.pop(), labels.pop()
            labels.append(_within(_MarkLabel(first.first, last.last, (first.at + last.at) / 2)))
    shapes += [element("text", label.text, x=label.at, y=TOP - 6, class_="mark-label") for label in labels]
    return shapes


def _within(label: _MarkLabel) -> _MarkLabel:
    """Move a label so that no part of it is outside of the plot."""
    return label._replace(at=min(WIDTH - label.half, max(label.half, label.at)))


def _series(x: Scale, y: Scale, line: Line) -> Markup:
    shapes = [element("path", d=_path(x, y, band) + "Z", class_="band") for band in line.bands]
    for run in line.runs:
        if len(run) > 1:
            shapes.append(element("path", d=_path(x, y, run), class_="line"))
        else:
            cx, cy = _place(x, y, run[0])
            shapes.append(element("circle", cx=cx, cy=cy, r=DOT_RADIUS, class_="dot"))
    return element("g", element("title", line.name), *shapes, class_=f"series {line.style}")
