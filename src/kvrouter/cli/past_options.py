"""What every command takes that reads a recording as the past, and replays nothing."""

from collections.abc import Callable
from pathlib import Path

import click

_OPTIONS = (
    click.argument("recording", type=click.Path(path_type=Path)),
    click.option("--model", metavar="NAME", help="The model; may be left out where one is recorded."),
    click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="What is printed.",
    ),
)


def past_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command RECORDING, ``--model`` and ``--output``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
