"""``--output``: how the result of a command is delivered, as a table or as JSON."""

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
            from kvrouter.commands.whole_file import check_folder  # noqa: PLC0415

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
            from kvrouter.commands.whole_file import write_whole  # noqa: PLC0415

            write_whole(self.path, as_json())


TABLE = Output()
"""The form of a result where nothing else is asked for."""


def json_text(result: object) -> bytes:
    """Return a result as JSON that people can read too."""
    import msgspec  # noqa: PLC0415

    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
