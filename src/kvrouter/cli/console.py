"""The console of commands: a terminal obeys no control characters in the text of others."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvrouter.cli.output import printable


class TextConsole(Console):
    """A terminal console that escapes the control characters in texts of engines, routers and files."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of ``renderable``; escapes that a style writes are control, and no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def error_console() -> TextConsole:
    """Standard error."""
    return TextConsole(stderr=True)
