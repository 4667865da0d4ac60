"""Send slices of traces through ``kvrouter up`` over HTTP, replay them, and compare choices and times.

    python -m benchmarks.live_replay mooncake=data/mooncake-conversation-sample.jsonl

Each SLICE is NAME=PATH or NAME=PATH,ROWS,SPEEDUP. Prints a table and writes it to benchmarks/results. Ends
with 1 when equal views made unequal choices, or the replay's router did not make a live decision again.
"""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

import click
from msgspec.structs import replace
from rich.console import Console

from benchmarks.frontend.client import AnswerFailed
from benchmarks.http_replay.fleet import FleetFailed
from benchmarks.http_replay.machine import ROOT
from benchmarks.live.run import Prepared, Run, Slice
from benchmarks.report import open_console, report
from benchmarks.results import Line, Measured, measured
from kvrouter.core.errors import ConfigError

FLEET = ROOT / "benchmarks" / "live" / "fleet.yaml"
RUNS = 3
ROWS = 120
SPEEDUP = 30.0
WITHIN = 1.1
"""The wanted ratio; one below it is wanted to be no further away."""

CORE_SHARE = 0.3


def parse_slices(
    _context: click.Context, _parameter: click.Parameter, texts: Sequence[str]
) -> tuple[Slice, ...]:
    """Parse each ``NAME=PATH[,ROWS[,SPEEDUP]]``."""
    return tuple(map(_parse_slice, texts))


def _parse_slice(text: str) -> Slice:
    name, equals, rest = text.partition("=")
    path, *numbers = rest.split(",")
    if not (name and equals and path) or len(numbers) > 2:
        raise click.BadParameter(f"{text!r} is not NAME=PATH,ROWS,SPEEDUP")
    try:
        rows = int(numbers[0]) if numbers else ROWS
        speedup = float(numbers[1]) if len(numbers) > 1 else SPEEDUP
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None
    if rows < 1 or not 0.0 < speedup < float("inf"):
        raise click.BadParameter(f"{text!r}: rows and speedup are above 0")
    return Slice(name, path, rows, speedup)


def lines_of(prepared: Prepared, runs: Sequence[Run]) -> list[Line]:
    """Return the lines of one slice: medians of its runs, live against replay."""
    variant = f"{prepared.of.name}, {prepared.fleet_path.stem}"
    lines = []
    for at, latency in enumerate(runs[0].latencies):
        live = measured([[run.latencies[at].live_ms] for run in runs])
        replay = measured([[run.latencies[at].replay_ms] for run in runs])
        lines.append(Line(latency.name, variant, "ms", live, "replay", replay, live.p50 / replay.p50, WITHIN))
    live, replay = _each(runs, lambda run: run.live_cached), _each(runs, lambda run: run.replay_cached)
    lines.append(Line("cached", variant, "share", live, "replay", replay, _ratio(live, replay)))
    for name, unit, of in (
        ("decisions", "in a run", lambda run: run.choices.decisions),
        ("equal views", "share", lambda run: run.choices.equal_views / run.choices.decisions),
        ("equal choices", "share", lambda run: run.choices.equal_choices / run.choices.decisions),
        ("equal views, unequal choices", "in a run", lambda run: len(run.choices.broken)),
        ("unequal when decided again", "in a run", lambda run: len(run.choices.not_again)),
        ("router and engines", "share of a core", lambda run: run.load.server),
        ("client", "share of a core", lambda run: run.load.client),
        ("client late, p99", "ms", lambda run: run.load.late_ms),
        ("engines' clock stood still", "s", lambda run: run.load.slipped_s),
        ("a run", "s", lambda run: run.lasted_s),
        ("load of the machine", "processes", lambda run: run.load.load_average),
    ):
        lines.append(Line(name, variant, unit, _each(runs, of)))
    return lines


def problems(prepared: Prepared, runs: Sequence[Run]) -> list[str]:
    """Return what must not be, and is."""
    return [
        f"{prepared.of.name}: {what}: {', '.join(names)}"
        for run in runs
        for what, names in (
            ("unequal choices from equal views", run.choices.broken),
            ("the replay's router chose otherwise", run.choices.not_again),
        )
        if names
    ]


def remarks(prepared: Prepared, runs: Sequence[Run]) -> list[str]:
    """Return what was wanted, and is not so: on a machine that is busy it may be the machine's."""
    said = []
    for at, latency in enumerate(runs[0].latencies):
        ratio = median(run.latencies[at].live_ms / run.latencies[at].replay_ms for run in runs)
        if not 1 / WITHIN <= ratio <= WITHIN:
            said.append(f"{prepared.of.name}: {latency.name}: live is {ratio:.3f} of the replay")
    for who, shares in (
        ("router and engines", [run.load.server for run in runs]),
        ("client", [run.load.client for run in runs]),
    ):
        if max(shares) > CORE_SHARE:
            said.append(f"{prepared.of.name}: {who} took {max(shares):.0%} of a core")
    return said


def _each(runs: Sequence[Run], of: Callable[[Run], float]) -> Measured:
    return measured([[float(of(run))] for run in runs])


def _ratio(live: Measured, replay: Measured) -> float | None:
    return live.p50 / replay.p50 if replay.p50 else None


@click.command(help=__doc__)
@click.argument("slices", nargs=-1, required=True, callback=parse_slices)
@click.option(
    "--fleet", "fleet_path", default=FLEET, show_default=True, help="Fleet file, with mock engines.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--apart-ms", type=click.FloatRange(min=0), default=100.0, show_default=True,
    help="How far apart requests arrive at least, on both sides; 0 keeps those of one time stamp together.",
)  # fmt: skip
@click.option("--runs", type=click.IntRange(min=1), default=RUNS, show_default=True, help="Runs of each.")
@click.option("--keep/--no-keep", default=True, help="Whether the result file is written.")
def main(*, slices: tuple[Slice, ...], fleet_path: Path, apart_ms: float, runs: int, keep: bool) -> None:
    """Measure, print, write, judge."""
    load_average = os.getloadavg()
    console, notes = open_console(), Console(stderr=True)
    lines: list[Line] = []
    wrong: list[str] = []
    try:
        for each in slices:
            prepared = Prepared(replace(each, apart_s=apart_ms / 1e3), fleet_path)
            done = []
            for number in range(runs):
                notes.print(f"{each.name}: run {number + 1} of {runs}, {len(prepared.rows)} requests")
                done.append(prepared.run())
            lines += lines_of(prepared, done)
            wrong += problems(prepared, done)
            for remark in remarks(prepared, done):
                notes.print(remark, style="yellow")
    except (ConfigError, FleetFailed, AnswerFailed, OSError) as error:
        raise click.ClickException(str(error)) from error
    versions = {"kvrouter": version("kvrouter")}
    report(f"live-replay-{fleet_path.stem}", lines, versions, load_average, console, keep=keep)
    for problem in wrong:
        notes.print(f"not as it must be: {problem}", style="red")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
