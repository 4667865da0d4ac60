"""``kvrouter dry-run``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.commands.options import DryRunOptions


@click.command("dry-run", short_help="Say which recorded requests a transfer policy would have refused.")
@click.argument("recording", type=click.Path(path_type=Path))
@takes(DryRunOptions)
def dry_run(options: DryRunOptions) -> None:
    """Decide every request of RECORDING, a folder or file of --record, again under another transfer policy:
    which would have been refused, why and when, and which would have gone to another pair.

    The decisions are the router's own, over the fleet as it was at each moment; no engine is simulated. The
    exit code is 0 whatever the answer is, but with --fail-if-refused.
    """
    from kvrouter.commands.dry_run import run_dry  # noqa: PLC0415

    sys.exit(run_dry(options, plain_console()))
