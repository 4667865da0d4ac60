"""``kvrouter hit-rate``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.past_options import past_options
from kvrouter.commands.output import Output


@click.command("hit-rate", short_help="Show where recorded requests lost their cache hits, and what helps.")
@past_options
@click.option(
    "--fleet",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The recorded workers with the KV blocks of this fleet file.  [default: as their cards say]",
)
def hit_rate(*, recording: Path, model: str | None, output: Output, fleet: Path | None) -> None:
    """Show the hit rate of RECORDING, a folder or file of --record, as a ladder: an endless cache, what the
    fleet can hold, perfect routing, what the router expected, what engines counted; and each loss between
    two rungs with its cause.

    Nothing is replayed: prompts go through caches of the recorded sizes, in the order of their decisions.
    """
    from kvrouter.commands.hit_rate import HitRateOptions, run_hit_rate  # noqa: PLC0415

    options = HitRateOptions(recording=recording, model=model, fleet=fleet, output=output)
    sys.exit(run_hit_rate(options, plain_console()))
