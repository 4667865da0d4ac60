"""``kvrouter hit-rate``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.commands.options import HitRateOptions


@click.command("hit-rate", short_help="Show where recorded requests lost their cache hits, and what helps.")
@click.argument("recording", type=click.Path(path_type=Path))
@takes(HitRateOptions)
def hit_rate(options: HitRateOptions) -> None:
    """Show the hit rate of RECORDING, a folder or file of --record, as a ladder: an endless cache, what the
    fleet can hold, perfect routing, what the router expected, what engines counted; and each loss between
    two rungs with its cause.

    Nothing is replayed: prompts go through caches of the recorded sizes, in the order of their decisions.
    """
    from kvrouter.commands.hit_rate import run_hit_rate  # noqa: PLC0415

    sys.exit(run_hit_rate(options, plain_console()))
