"""What every command takes that reads a recording as the past, and replays nothing."""

from collections.abc import Callable
from pathlib import Path

import click

from kvrouter.cli.flags import output_option

_OPTIONS = (
    click.argument("recording", type=click.Path(path_type=Path)),
    click.option("--model", metavar="NAME", help="The model; may be left out where one is recorded."),
    output_option,
)


def past_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command RECORDING, ``--model`` and ``--output``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
