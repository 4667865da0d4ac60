"""The command line of ``kvrouter replay``: its options and its help."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.replay.input_options import FileOptions, PolicyOptions, ReplayInputOptions


@click.command(short_help="Replay recorded traffic over a fleet, and compare routing rules.")
@click.argument("trace", type=click.Path(path_type=Path))
@takes(PolicyOptions, ReplayInputOptions, FileOptions)
def replay(policy: PolicyOptions, input_options: ReplayInputOptions, files: FileOptions) -> None:
    """Replay TRACE over a fleet of mock engines, through the router's own decisions, as fast as it goes.

    TRACE is recognised by its content: Mooncake rows, dynamo.agentic_mooncake, agentic sessions, Azure's or
    BurstGPT's CSV, what vllm bench serve --save-detailed wrote, dynamo.request.trace.v1, a recording of
    --record (its folder, or one file), or a generator's YAML; packed by gzip or not. The same seed gives the
    same figures.
    """

    from kvrouter.cli.replay.run import replay as run  # noqa: PLC0415

    sys.exit(run(policy, input_options, files, plain_console(line_chars=180)))
