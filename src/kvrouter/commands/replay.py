"""``kvrouter replay``: a trace over a fleet, by one rule or several, and what came of it."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.commands.replay_inputs import INTERRUPTED, InputOptions, open_inputs, replay_progress
from kvrouter.commands.whole_file import check_folder, write_whole
from kvrouter.config.problems import Document, parse_document, read_document
from kvrouter.config.setting import installed_version
from kvrouter.sim.comparison import shown_columns
from kvrouter.sim.page.document import render_page
from kvrouter.sim.places import Places
from kvrouter.sim.simulation import Beat
from kvrouter.sim.summary import ReplayReport, Summary, VariantReport, summarize
from kvrouter.sim.variant import DEFAULT_FLEET, parse_sweep, variants


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command was given."""

    inputs: InputOptions
    fleet: Path | None
    policies: tuple[str, ...]
    sweeps: tuple[str, ...]
    report: Path | None = None


def replay(options: ReplayOptions, console: Console) -> int:
    """Replay every variant with every seed; print a table, and write what was asked for. Returns the exit
    code; what is known when it is interrupted is printed and written all the same.

    Raises ConfigError, before anything is replayed, for what cannot be.
    """
    given = options.inputs
    for path in filter(None, (given.json, options.report)):
        check_folder(path)
    inputs = open_inputs(given)
    document = _document(options.fleet)
    compared = variants(document, options.policies, [parse_sweep(sweep) for sweep in options.sweeps])
    seeds = given.all_seeds
    n_rows = inputs.check(compared)
    reports: list[VariantReport] = []
    is_whole = True
    with replay_progress() as progress:
        task = progress.add_task("", total=n_rows * len(compared) * len(seeds))
        for variant in compared:
            places = Places(variant.fleet)
            summaries: list[Summary] = []
            for seed in seeds:
                done = len(reports) * len(seeds) + len(summaries)
                progress.update(task, description=variant.name, completed=done * n_rows)

                def show(beat: Beat, done: int = done) -> None:
                    progress.update(task, completed=done * n_rows + beat.arrived)

                simulation = inputs.simulation(variant, seed)
                simulation.on_beat = show
                summaries.append(summarize(simulation.run(), given.objective, places))
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
        str(given.trace),
        inputs.trace.info.format,
        inputs.dispatch.name,
        given.objective,
        is_whole,
        tuple(reports),
    )
    show_report(report, console)
    if given.json is not None:
        write_whole(given.json, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if options.report is not None:
        write_whole(options.report, render_page(report))
    return 0 if is_whole else INTERRUPTED


def show_report(report: ReplayReport, console: Console) -> None:
    """Print a row for each variant, with 95 % intervals where several seeds were replayed."""
    table = Table(title=Text(f"{report.trace}: {report.format}, dispatched {report.dispatch}"))
    table.add_column("policy", overflow="fold")
    group = ""
    columns = shown_columns(summary for variant in report.variants for summary in variant.summaries)
    for column in columns:
        heading = column.name if column.group == group else f"{column.group} {column.name}".rstrip()
        table.add_column(heading, justify="right")
        group = column.group
    for variant in report.variants:
        cells = (column.shown(column.over(variant.summaries)) for column in columns)
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


def _document(fleet: Path | None) -> Document:
    return parse_document(DEFAULT_FLEET, "the default fleet") if fleet is None else read_document(fleet)
