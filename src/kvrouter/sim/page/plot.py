"""A plot with lines, as an SVG element that takes its colours from the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.scale import Scale

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 18, 28
DOT_RADIUS = 2.0


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


def plot(label: str, x: Scale, y: Scale, lines: Sequence[Line], mark: Mark | None = None) -> Markup:
    """Return the plot; ``label`` says to who does not see it what it shows. The first line is on top."""
    return element(
        "svg",
        element("title", label),
        *_grid(x, y),
        *(() if mark is None else _marked(x, y, mark)),
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


def _marked(x: Scale, y: Scale, mark: Mark) -> tuple[Markup, ...]:
    if not x.low <= mark.x <= x.high:
        return ()
    at, _ = _place(x, y, Point(mark.x, y.low))
    placed = "mark-label end" if x.share(mark.x) > 0.6 else "mark-label"
    return (
        element("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark"),
        element("text", mark.label, x=at, y=TOP - 6, class_=placed),
    )


def _series(x: Scale, y: Scale, line: Line) -> Markup:
    shapes = [element("path", d=_path(x, y, band) + "Z", class_="band") for band in line.bands]
    for run in line.runs:
        if len(run) > 1:
            shapes.append(element("path", d=_path(x, y, run), class_="line"))
        else:
            cx, cy = _place(x, y, run[0])
            shapes.append(element("circle", cx=cx, cy=cy, r=DOT_RADIUS, class_="dot"))
    return element("g", element("title", line.name), *shapes, class_=f"series {line.style}")
