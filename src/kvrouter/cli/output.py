"""``--output``: how the result of a command is delivered, as a table or as JSON."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Output(NamedTuple):
    """A table on standard output, or JSON there; or the table there and JSON in the file ``path``."""

    is_json: bool = False
    path: Path | None = None

    def check(self) -> None:
        """Raise ConfigError where the file cannot be written, before anything was done for it."""
        if self.path is not None:
            from kvrouter.app.atomic_file import check_folder  # noqa: PLC0415

            check_folder(self.path)

    def show(self, as_json: Callable[[], bytes], draw: Callable[[], None]) -> None:
        """Deliver a result: ``as_json`` returns it, ``draw`` prints its table. Raises ConfigError for a file
        that cannot be written.
        """
        if self.is_json:
            sys.stdout.write(as_json().decode().rstrip("\n") + "\n")
            return
        draw()
        if self.path is not None:
            from kvrouter.app.atomic_file import write_atomic  # noqa: PLC0415

            write_atomic(self.path, as_json())


TABLE = Output()
"""The default form of a result."""


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls that a terminal may obey, without new lines and tabs, and marks of a line's direction."""


def printable(text: str) -> str:
    """Return text of others in the form that a terminal may show."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines for people; ``err``: on standard error."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


def json_text(result: object) -> bytes:
    """Return a result as readable JSON, with a terminal's control characters escaped."""
    import msgspec  # noqa: PLC0415

    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"
