"""``kvrouter replay``: a trace over a fleet, by one rule or several, and what came of it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvrouter.commands.whole_file import check_folder, write_whole
from kvrouter.config.fleet_engines import MockTiming
from kvrouter.config.problems import (
    Document,
    config_error,
    parse_document,
    problem_of,
    read_document,
)
from kvrouter.config.setting import installed_version
from kvrouter.core.errors import ConfigError
from kvrouter.mock import Timing
from kvrouter.sim.comparison import COLUMNS
from kvrouter.sim.dispatch import ByTimeStamp, ClosedLoop, Dispatch
from kvrouter.sim.page.document import render_page
from kvrouter.sim.simulation import Beat, Simulation, check_room
from kvrouter.sim.summary import Objective, ReplayReport, Summary, VariantReport, summarize
from kvrouter.sim.timetable import TimetableEvent, check_timetable, read_timetable
from kvrouter.sim.traces.read import Trace, open_trace
from kvrouter.sim.variant import DEFAULT_FLEET, Variant, parse_sweep, variants

INTERRUPTED = 130
"""The exit code of a program that was interrupted."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command was given."""

    trace: Path
    model: str | None
    fleet: Path | None
    policies: tuple[str, ...]
    sweeps: tuple[str, ...]
    dispatch: str
    speedup: float
    rows: int | None
    seed: int
    seeds: int
    timing: Path | None
    events: Path | None
    objective: Objective
    json: Path | None
    report: Path | None = None


def replay(options: ReplayOptions, console: Console) -> int:
    """Replay every variant with every seed; print a table, and write what was asked for. Returns the exit
    code; what is known when it is interrupted is printed and written all the same.

    Raises ConfigError, before anything is replayed, for what cannot be.
    """
    for path in filter(None, (options.json, options.report)):
        check_folder(path)
    warnings = Console(stderr=True)
    trace = open_trace(
        options.trace,
        rows_max=options.rows,
        model=options.model,
        warn=lambda what: warnings.print(Text(f"warning: {what}"), soft_wrap=True),
    )
    document = _document(options.fleet)
    timing = None if options.timing is None else read_timing(options.timing)
    timetable = () if options.events is None else read_timetable(options.events)
    inputs = _Inputs(options, trace, timing, timetable)
    compared = variants(document, options.policies, [parse_sweep(sweep) for sweep in options.sweeps])
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    n_rows = inputs.check(compared)
    reports: list[VariantReport] = []
    is_whole = True
    with _progress() as progress:
        task = progress.add_task("", total=n_rows * len(compared) * len(seeds))
        for variant in compared:
            summaries: list[Summary] = []
            for seed in seeds:
                done = len(reports) * len(seeds) + len(summaries)
                progress.update(task, description=variant.name, completed=done * n_rows)

                def show(beat: Beat, done: int = done) -> None:
                    progress.update(task, completed=done * n_rows + beat.arrived)

                simulation = inputs.simulation(variant, seed)
                simulation.on_beat = show
                summaries.append(summarize(simulation.run(), options.objective))
                is_whole = summaries[-1].is_whole
                if not is_whole:
                    break
            reports.append(
                VariantReport(variant.name, variant.source, seeds[: len(summaries)], tuple(summaries))
            )
            if not is_whole:
                break
    report = ReplayReport(
        installed_version(),
        str(options.trace),
        trace.info.format,
        _dispatch(options).name,
        options.objective,
        is_whole,
        tuple(reports),
    )
    show_report(report, console)
    if options.json is not None:
        write_whole(options.json, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if options.report is not None:
        write_whole(options.report, render_page(report))
    return 0 if is_whole else INTERRUPTED


def read_timing(path: Path) -> Timing:
    """Read the timing of all engines from a YAML file; raises ConfigError that names line and field."""
    document = read_document(path)
    try:
        return Timing(**MockTiming.model_validate(document.content).model_dump())
    except ValidationError as error:
        raise config_error(
            [problem_of(item, MockTiming) for item in error.errors()], document.place
        ) from error


def show_report(report: ReplayReport, console: Console) -> None:
    """Print a row for each variant, with 95 % intervals where several seeds were replayed."""
    table = Table(title=Text(f"{report.trace}: {report.format}, dispatched {report.dispatch}"))
    table.add_column("policy", overflow="fold")
    group = ""
    for column in COLUMNS:
        heading = column.name if column.group == group else f"{column.group} {column.name}".rstrip()
        table.add_column(heading, justify="right")
        group = column.group
    for variant in report.variants:
        cells = (column.shown(column.over(variant.summaries)) for column in COLUMNS)
        table.add_row(Text(variant.name), *cells)
    console.print(table)
    for variant in report.variants:
        first = variant.summaries[0]
        for name, counts in (("errors", first.errors), ("refused", first.refusals)):
            if counts:
                shown = ", ".join(f"{count} {reason}" for reason, count in counts.items())
                console.print(Text(f"{variant.name}: {name}: {shown}"))
    objective = report.objective
    console.print(
        f"good: first token within {objective.ttft_s:g} s, tokens {objective.itl_s:g} s apart on average"
    )
    if not report.is_whole:
        console.print("interrupted: the last row is what was known until then")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What every replay of a command has in common."""

    options: ReplayOptions
    trace: Trace
    timing: Timing | None
    timetable: tuple[TimetableEvent, ...]

    def simulation(self, variant: Variant, seed: int) -> Simulation:
        """Return one replay, from its beginning."""
        return Simulation(
            variant.fleet,
            self.trace,
            config=variant.fleet.router,
            dispatch=_dispatch(self.options),
            piece_tokens=self.trace.info.piece_tokens,
            rule=variant.make_rule(),
            seed=seed,
            timing=self.timing,
            timetable=self.timetable,
        )

    def check(self, compared: Sequence[Variant]) -> int:
        """Return how many requests the trace has. Find what cannot be replayed before anything is: in its
        rows, in each fleet, in the timetable.
        """
        if self.options.dispatch == "closed" and not self.trace.info.has_sessions:
            raise ConfigError(
                f"dispatch: {self.trace.info.format} has no sessions, so no turn follows an answer; "
                "replay it by time stamp",
                param="dispatch",
            )
        n_rows = 0
        for variant in compared:
            check_timetable(self.timetable, variant.fleet)
            n_rows = check_room(self.trace, self.simulation(variant, self.options.seed).fleet)
        return n_rows


def _dispatch(options: ReplayOptions) -> Dispatch:
    return ClosedLoop() if options.dispatch == "closed" else ByTimeStamp(options.speedup)


def _document(fleet: Path | None) -> Document:
    return parse_document(DEFAULT_FLEET, "the default fleet") if fleet is None else read_document(fleet)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
