"""A plot with lines: the position of each of its parts, in the units of its drawing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvrouter.sim.report.scale import Scale

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 18, 28
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


class MarkLabel(NamedTuple):
    """The text over one mark, or over several with overlapping texts: from the first to the last. ``at`` is
    its middle.
    """

    first: str
    last: str
    at: float

    @property
    def text(self) -> str:
        """The labels of its marks."""
        return self.first if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def half(self) -> float:
        """Half of its width, about."""
        return len(self.text) * LABEL_CHAR_WIDTH / 2 + 2


@dataclass(frozen=True, slots=True)
class Plot:
    """``label`` is the text for readers who do not see it. The first line is on top, and ``marks`` are in the
    order of their values; those beyond the axis are left out.
    """

    label: str
    x: Scale
    y: Scale
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    width: ClassVar = WIDTH
    height: ClassVar = HEIGHT
    area: ClassVar = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    """Where the axes begin and end: left, right, top, bottom."""

    def across(self, x: float) -> float:
        """Return the position of a value on the horizontal axis."""
        return LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        """Return the position of a value on the vertical axis."""
        return HEIGHT - BOTTOM - self.y.share(y) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        """Return the line through the points, as SVG has it."""
        return "M" + "L".join(f"{self.across(point.x):.1f} {self.up(point.y):.1f}" for point in points)

    def shown_marks(self) -> list[Mark]:
        """Return the marks that are not beyond the axis."""
        return [mark for mark in self.marks if self.x.low <= mark.x <= self.x.high]

    def mark_labels(self) -> list[MarkLabel]:
        """Return the texts over the marks, without overlaps."""
        labels: list[MarkLabel] = []
        for mark in self.shown_marks():
            labels.append(_within(MarkLabel(mark.label, mark.label, self.across(mark.x))))
            while len(labels) > 1 and labels[-1].at - labels[-1].half < labels[-2].at + labels[-2].half:
                last, first = labels.pop(), labels.pop()
                labels.append(_within(MarkLabel(first.first, last.last, (first.at + last.at) / 2)))
        return labels


def _within(label: MarkLabel) -> MarkLabel:
    """Move a label so that no part of it is outside of the plot."""
    return label._replace(at=min(WIDTH - label.half, max(label.half, label.at)))
