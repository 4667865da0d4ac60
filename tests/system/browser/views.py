"""What a browser saw of a page, as ``look.mjs`` prints it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.system.browser.install import HERE, browser_dir, node, program

LOOKS_WITHIN_S = 120.0
"""Far above what a busy machine needs to open a page four times."""


class Box(msgspec.Struct, frozen=True):
    """A place on the page, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def holds(self, other: "Box", slack: float = 1.0) -> bool:
        """Whether the other is inside, but for ``slack`` pixels."""
        return (
            self.x - slack <= other.x
            and self.y - slack <= other.y
            and other.x + other.width <= self.x + self.width + slack
            and other.y + other.height <= self.y + self.height + slack
        )

    def meets(self, other: "Box") -> bool:
        """Whether the two cover a place together."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


class Label(msgspec.Struct, frozen=True):
    """A text in a plot."""

    text: str
    box: Box


class Shape(msgspec.Struct, frozen=True):
    """A line, dot or band of a plot, with the name that it belongs to."""

    name: str
    kind: str
    box: Box
    stroke: str
    fill: str


class Plot(msgspec.Struct, frozen=True):
    """A plot; ``frame`` is where its axes are, ``marks`` are its vertical lines."""

    label: str
    box: Box
    frame: Box
    marks: list[Box]
    texts: list[Label]
    lines: list[Shape]


class Table(msgspec.Struct, frozen=True):
    """A table, with the region that it scrolls in."""

    label: str
    box: Box
    text: str


class Section(msgspec.Struct, frozen=True):
    """A part of the page."""

    title: str
    box: Box


class View(msgspec.Struct, frozen=True):
    """The page in one width and colour scheme.

    ``pointed`` is how strongly each line of the first plot is drawn while the pointer is on the legend's last
    entry, from 0 to 1. ``requests`` are those for anything but the page itself.
    """

    scheme: str
    width: int
    complaints: list[str]
    requests: list[str]
    picture: str
    title: str
    text: str
    background: str
    ink: str
    inner_width: float
    scroll_width: float
    plots: list[Plot]
    tables: list[Table]
    sections: list[Section]
    pointed: dict[str, float]


class Look(msgspec.Struct, frozen=True):
    """All views, and the browser's version."""

    version: str
    views: list[View]


def look(page: Path, folder: Path, widths: Sequence[int]) -> Look:
    """Open the page in a real browser; pictures come into ``folder``. Raises NotInstalled."""
    arguments = [*map(str, (browser_dir(), program(), page, folder)), ",".join(map(str, widths))]
    done = subprocess.run(
        [node(), str(HERE / "look.mjs"), *arguments],
        capture_output=True,
        text=True,
        timeout=LOOKS_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Look)
