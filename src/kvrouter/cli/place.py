"""The flags that tell where a worker is, and what its KV transfers keep to; alike for every engine."""

from collections.abc import Callable
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--domain",
        multiple=True,
        metavar="LEVEL=VALUE",
        help="Where it is, the broadest level first: --domain zone=a --domain rack=r7.",
    ),
    click.option("--taint", multiple=True, metavar="TEXT", help="A taint of its own; may be repeated."),
    click.option("--kv-transfer-domain", metavar="LEVEL", help="The domain that its KV transfers keep to."),
    click.option(
        "--kv-transfer-enforcement",
        metavar="required|preferred|fallback",
        help="How strictly.  [default: required]",
    ),
    click.option("--kv-transfer-preferred-weight", type=float, metavar="NUMBER", help="From 0 to 1."),
)


def place_options(command: Command) -> Command:
    """Give ``command`` the flags ``--domain``, ``--taint`` and ``--kv-transfer-…``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
