"""The command line of ``kvrouter dry-run``: its options and its help."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.past_options import PastOptions
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunOptions(PastOptions):
    """The policy under which requests are decided again; ``wait_s`` are seconds."""

    domain: str = option(
        "The domain that KV transfers would have kept to, as the workers' labels call it: zone.",
        is_required=True,
        flag="--kv-transfer-domain",
        metavar="LEVEL",
    )
    enforcement: Literal["required", "fallback"] = option(
        "How strictly. What is preferred refuses nobody.",
        default="required",
        flag="--kv-transfer-enforcement",
    )
    wait_s: float = option(
        "How long a request would have waited for a decode worker to join its domain.",
        default=0.0,
        flag="--router-domain-wait",
        metavar="SECONDS",
    )
    fail_if_refused: bool = option("Exit with 1 where a request would have been refused.", default=False)


@click.command("dry-run", short_help="Say which recorded requests a transfer policy would have refused.")
@click.argument("recording", type=click.Path(path_type=Path))
@takes(DryRunOptions)
def dry_run(options: DryRunOptions) -> None:
    """Decide every request of RECORDING, a folder or file of --record, again under another transfer policy:
    which would have been refused, why and when, and which would have gone to another pair.

    The decisions are the router's own, over the fleet as it was at each moment; no engine is simulated. The
    exit code is 0 whatever the answer is, but with --fail-if-refused.
    """
    from kvrouter.cli.dry_run.run import run_dry  # noqa: PLC0415

    sys.exit(run_dry(options, plain_console()))
