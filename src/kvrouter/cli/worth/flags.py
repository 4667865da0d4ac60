"""The command line of ``kvrouter worth``: its options and its help."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.replay.input_options import WorthInputOptions, WorthOptions


@click.command(short_help="Say what other transfer policies would change, and whether to switch.")
@click.argument("trace", type=click.Path(path_type=Path))
@takes(WorthOptions, WorthInputOptions)
def worth(options: WorthOptions, input_options: WorthInputOptions) -> None:
    """Replay TRACE over the fleet as it is, and with every other enforcement, level, router mode and cost;
    show what each would change in TTFT, goodput, failures, bytes that cross and money, and give advice, which
    may be "leave it". With --upgraded, show too what an upgrade costs halfway.

    TRACE is whatever `kvrouter replay` reads, recordings too. The same seeds give the same figures.
    """

    from kvrouter.cli.worth.run import worth as run  # noqa: PLC0415

    sys.exit(run(options, input_options, plain_console()))
