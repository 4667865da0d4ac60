"""Where commands print for people: whatever others wrote, a terminal obeys none of it."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvrouter.cli.output import printable


class TextConsole(Console):
    """A terminal that shows words of engines, routers and files, and escapes what controls it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of ``renderable``; what a style writes is control, and no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def error_console() -> TextConsole:
    """Standard error."""
    return TextConsole(stderr=True)
