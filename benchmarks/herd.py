"""``make bench-herd``: several routers before one fleet, open loop. Do they meet at the same worker?

For each number of routers, with replica sync and without: the busiest worker's load over the mean of all, at
equal distances in time, next to what one router gets from the same arrivals.
"""

import os
from importlib.metadata import version

import click
from rich.progress import Progress

from benchmarks.herd_fleet import JumpingLoop, Outcome, run_fleet
from benchmarks.herd_load import Load
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured

N_WORKERS = 32
ROUTERS = (2, 4, 8, 16)
SEEDS = (1, 2, 3)
SYNC_DELAY_S = (0.001, 0.005)
"""How long a message is on its way, evenly spread; a delta waits for 1 ms more before it is sent."""

SAMPLE_S = 0.05
WANTED_RATIO = 1.1
RATIO_UNIT = "busiest/mean"


LOADS = (
    Load("chat", rate=250.0, isl_tokens=1_000, osl_tokens=200, lasts_s=24.0, warm_s=10.0),
    Load("short", rate=1_500.0, isl_tokens=200, osl_tokens=20, lasts_s=6.0, warm_s=2.0),
)


def run(load: Load, n_routers: int, *, syncs: bool) -> list[Outcome]:
    """Run the load once a seed."""
    outcomes = []
    for seed in SEEDS:
        loop = JumpingLoop()
        try:
            outcomes.append(
                loop.run_until_complete(
                    run_fleet(
                        load.arrivals(seed),
                        n_routers=n_routers,
                        n_workers=N_WORKERS,
                        sync_delay_s=SYNC_DELAY_S if syncs else None,
                        warm_s=load.warm_s,
                        sample_s=SAMPLE_S,
                        seed=seed,
                    )
                )
            )
        finally:
            loop.close()
    return outcomes


def lines_of(load: Load, variant: str, ours: list[Outcome], one: list[Outcome]) -> list[Line]:
    """Set the outcomes next to those of one router."""
    lines = []
    for unit, wanted in ((RATIO_UNIT, WANTED_RATIO), ("ms to first token", None)):
        samples = [o.busiest_over_mean if unit == RATIO_UNIT else o.first_tokens_ms for o in ours]
        companion = [o.busiest_over_mean if unit == RATIO_UNIT else o.first_tokens_ms for o in one]
        mine, theirs = measured(samples), measured(companion)
        ratio = mine.p50 / theirs.p50
        is_synced = "with sync" in variant
        lines.append(
            Line(
                load.name,
                variant,
                unit,
                mine,
                peer="one router",
                theirs=theirs,
                ratio=ratio,
                wanted_ratio=wanted if is_synced else None,
            )
        )
    return lines


@click.command()
@click.option("--only", metavar="TEXT", help="Run the loads with this in their name; write no file.")
def main(only: str | None) -> None:
    """Run every load before 1 to 16 routers, print the table, and write the result file."""
    loads = [load for load in LOADS if only is None or only in load.name]
    if not loads:
        raise click.UsageError(f"--only: no load's name has {only!r} in it")
    load_average = os.getloadavg()
    console = open_console()
    lines: list[Line] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(loads) * (1 + 2 * len(ROUTERS)))
        for load in loads:
            progress.update(task, description=load.name)
            one = run(load, 1, syncs=False)
            progress.advance(task)
            for syncs in (False, True):
                for n_routers in ROUTERS:
                    variant = f"{n_routers} routers, {'with' if syncs else 'without'} sync"
                    lines += lines_of(load, variant, run(load, n_routers, syncs=syncs), one)
                    progress.advance(task)
    versions = {name: version(name) for name in ("kvrouter", "numpy")}
    lines.sort(key=lambda line: (line.row, line.unit))
    report("herd", lines, versions, load_average, console, keep=only is None)


if __name__ == "__main__":
    main()
