"""``kvrouter replay``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.replay_options import FILE, replay_options
from kvrouter.commands.input_options import InputOptions


@click.command(short_help="Replay recorded traffic over a fleet, and compare routing rules.")
@click.argument("trace", type=FILE)
@click.option(
    "--fleet",
    type=FILE,
    metavar="FILE",
    help="The fleet.  [default: the recorded one, else 8 aggregated mock workers]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Who routes: kvrouter, with settings as kvrouter:overlap_score_weight=4, or a published rule: "
    "round-robin, random, least-loaded, power-of-two, dynamo, lmetric, predicted-ttft, llm-d, aibrix, "
    "sglang or sticky. Give it again to compare.  [default: kvrouter]",
)
@click.option("--compare", default="", metavar="NAME,NAME", help="The same, all in one option.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=A,B",
    help="Replay with each value of a key of the fleet file, as kv_transfer.enforcement=required,preferred.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Give every policy the parameters that suit the first half of the trace, and show the second.",
)
@replay_options(seeds=1, seeds_help="Replay with so many seeds, and show 95 % intervals.")
@click.option(
    "--report",
    "report_path",
    type=FILE,
    metavar="FILE",
    help="Write a page with tables and plots there, in HTML.",
)
@click.option(
    "--write-fleet", type=FILE, metavar="FILE", help="Write the fleet of a recording there, as a fleet file."
)
@click.option(
    "--write-events",
    type=FILE,
    metavar="FILE",
    help="Write the changes of a recording's fleet there, as an events file.",
)
def replay(
    *,
    fleet: Path | None,
    policies: tuple[str, ...],
    compare: str,
    sweeps: tuple[str, ...],
    tune: bool,
    given: InputOptions,
    report_path: Path | None,
    write_fleet: Path | None,
    write_events: Path | None,
) -> None:
    """Replay TRACE over a fleet of mock engines, through the router's own decisions, as fast as it goes.

    TRACE is recognised by its content: Mooncake rows, dynamo.agentic_mooncake, agentic sessions, an Azure
    CSV, dynamo.request.trace.v1, a recording of --record (its folder, or one file), or a generator's YAML;
    packed by gzip or not. The same seed gives the same figures.
    """

    from kvrouter.commands.replay import ReplayOptions  # noqa: PLC0415
    from kvrouter.commands.replay import replay as run  # noqa: PLC0415
    from kvrouter.sim.variant import split_policies  # noqa: PLC0415

    named = (*policies, *split_policies(compare))
    options = ReplayOptions(
        inputs=given,
        fleet=fleet,
        policies=named or ("kvrouter",),
        sweeps=sweeps,
        tune=tune,
        report=report_path,
        write_fleet=write_fleet,
        write_events=write_events,
    )
    sys.exit(run(options, plain_console(line_chars=180)))
