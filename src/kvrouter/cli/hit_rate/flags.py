"""The command line of ``kvrouter hit-rate``: its options and its help."""

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.past_options import PastOptions
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateOptions(PastOptions):
    """The workers whose hits are looked at."""

    fleet: Path | None = option(
        "The recorded workers with the KV blocks of this fleet file.  [default: as their cards say]",
        metavar="FILE",
    )


@click.command("hit-rate", short_help="Show where recorded requests lost their cache hits, and what helps.")
@click.argument("recording", type=click.Path(path_type=Path))
@takes(HitRateOptions)
def hit_rate(options: HitRateOptions) -> None:
    """Show the hit rate of RECORDING, a folder or file of --record, as a ladder: an endless cache, what the
    fleet can hold, perfect routing, what the router expected, what engines counted; and each loss between
    two rungs with its cause.

    Nothing is replayed: prompts go through caches of the recorded sizes, in the order of their decisions.
    """
    from kvrouter.cli.hit_rate.run import run_hit_rate  # noqa: PLC0415

    sys.exit(run_hit_rate(options, plain_console()))
