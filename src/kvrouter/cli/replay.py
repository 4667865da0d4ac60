"""``kvrouter replay``."""

import sys
from pathlib import Path

import click

FILE = click.Path(path_type=Path)


@click.command(short_help="Replay recorded traffic over a fleet, and compare routing rules.")
@click.argument("trace", type=FILE)
@click.option("--model", metavar="NAME", help="The model of a recording; may be left out where it has one.")
@click.option("--fleet", type=FILE, metavar="FILE", help="The fleet.  [default: 8 aggregated mock workers]")
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
    "--dispatch",
    type=click.Choice(["timestamp", "closed"]),
    default="timestamp",
    show_default=True,
    help="When requests arrive: as the trace says, or each turn its think time after the answer before it.",
)
@click.option(
    "--speedup", type=float, default=1.0, show_default=True, help="By time stamp, so many times as fast."
)
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Only the first requests.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="What is drawn from.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Replay with so many seeds, and show 95 % intervals.",
)
@click.option("--timing", type=FILE, metavar="FILE", help="The timing of every engine, in YAML.")
@click.option(
    "--events", type=FILE, metavar="FILE", help="When workers die and come back during the replay, in YAML."
)
@click.option(
    "--slo-ttft", type=float, default=2.0, show_default=True, help="Seconds in which a good answer begins."
)
@click.option(
    "--slo-itl", type=float, default=0.05, show_default=True, help="Mean seconds between its tokens, at most."
)
@click.option("--json", "json_path", type=FILE, metavar="FILE", help="Write all figures there.")
@click.option(
    "--report",
    "report_path",
    type=FILE,
    metavar="FILE",
    help="Write a page with tables and plots there, in HTML.",
)
def replay(
    trace: Path,
    *,
    model: str | None,
    fleet: Path | None,
    policies: tuple[str, ...],
    compare: str,
    sweeps: tuple[str, ...],
    dispatch: str,
    speedup: float,
    rows: int | None,
    seed: int,
    seeds: int,
    timing: Path | None,
    events: Path | None,
    slo_ttft: float,
    slo_itl: float,
    json_path: Path | None,
    report_path: Path | None,
) -> None:
    """Replay TRACE over a fleet of mock engines, through the router's own decisions, as fast as it goes.

    TRACE is recognised by its content: Mooncake rows, agentic sessions, an Azure CSV,
    dynamo.request.trace.v1, a recording of --record (its folder, or one file), or a generator's YAML;
    packed by gzip or not. The same seed gives the same figures.
    """
    from rich.console import Console  # noqa: PLC0415

    from kvrouter.commands.replay import ReplayOptions  # noqa: PLC0415
    from kvrouter.commands.replay import replay as run  # noqa: PLC0415
    from kvrouter.sim.summary import Objective  # noqa: PLC0415
    from kvrouter.sim.variant import split_policies  # noqa: PLC0415

    named = (*policies, *split_policies(compare))
    options = ReplayOptions(
        trace=trace,
        model=model,
        fleet=fleet,
        policies=named or ("kvrouter",),
        sweeps=sweeps,
        dispatch=dispatch,
        speedup=speedup,
        rows=rows,
        seed=seed,
        seeds=seeds,
        timing=timing,
        events=events,
        objective=Objective(ttft_s=slo_ttft, itl_s=slo_itl),
        json=json_path,
        report=report_path,
    )
    console = Console()
    sys.exit(run(options, console if console.is_terminal else Console(width=180, no_color=True)))
