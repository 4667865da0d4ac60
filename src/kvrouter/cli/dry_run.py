"""``kvrouter dry-run``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.past_options import past_options
from kvrouter.commands.output import Output


@click.command("dry-run", short_help="Say which recorded requests a transfer policy would have refused.")
@past_options
@click.option(
    "--kv-transfer-domain",
    "domain",
    required=True,
    metavar="LEVEL",
    help="The domain that KV transfers would have kept to, as the workers' labels call it: zone.",
)
@click.option(
    "--kv-transfer-enforcement",
    "enforcement",
    type=click.Choice(["required", "fallback"]),
    default="required",
    show_default=True,
    help="How strictly. What is preferred refuses nobody.",
)
@click.option(
    "--router-domain-wait",
    "wait_s",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a request would have waited for a decode worker to join its domain.",
)
@click.option("--fail-if-refused", is_flag=True, help="Exit with 1 where a request would have been refused.")
def dry_run(
    *,
    recording: Path,
    model: str | None,
    output: Output,
    domain: str,
    enforcement: str,
    wait_s: float,
    fail_if_refused: bool,
) -> None:
    """Decide every request of RECORDING, a folder or file of --record, again under another transfer policy:
    which would have been refused, why and when, and which would have gone to another pair.

    The decisions are the router's own, over the fleet as it was at each moment; no engine is simulated. The
    exit code is 0 whatever the answer is, but with --fail-if-refused.
    """
    from kvrouter.commands.dry_run import DryRunOptions, run_dry  # noqa: PLC0415
    from kvrouter.core.workers import Enforcement  # noqa: PLC0415

    options = DryRunOptions(
        recording=recording,
        model=model,
        domain=domain.strip(),
        enforcement=Enforcement(enforcement),
        wait_s=wait_s,
        output=output,
        fails_if_refused=fail_if_refused,
    )
    sys.exit(run_dry(options, plain_console()))
