"""From rows to lines, with a progress bar; from lines to a table and a result file."""

import os
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.results import Line, Measured, Result, new_result, write_result
from benchmarks.rows import Row

FILE_COLUMNS = 160


def open_console() -> Console:
    """Return the console of this terminal; what is no terminal gets lines wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_COLUMNS)


def measure_rows(rows: Sequence[Row], measure: Callable[[Row], list[Line]], console: Console) -> list[Line]:
    """Measure one row after the other."""
    lines: list[Line] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=row.name)
            lines += measure(row)
            progress.advance(task)
    return lines


def report(
    name: str,
    lines: Sequence[Line],
    versions: dict[str, str],
    load_average: tuple[float, float, float],
    console: Console,
    *,
    keep: bool,
) -> None:
    """Print the table; write the result file when it is to be kept."""
    result = new_result(name, versions=versions, lines=lines, load_average=load_average)
    print_result(result, console)
    if keep:
        console.print(f"written to {os.path.relpath(write_result(result))}")


def print_result(result: Result, console: Console) -> None:
    """Print the lines, and what they were measured with."""
    companion = any(line.theirs is not None for line in result.lines)
    table = Table(title=f"{result.name}, {result.commit.id}{' (changed)' if result.commit.changed else ''}")
    for heading in ("row", "variant", "unit"):
        table.add_column(heading)
    for heading in ("ours p50", "p99"):
        table.add_column(heading, justify="right")
    if companion:
        table.add_column("with")
        for heading in ("theirs p50", "p99", "ratio", "wanted"):
            table.add_column(heading, justify="right")
    row = ""
    for line in result.lines:
        if row not in ("", line.row):
            table.add_section()
        cells = ["" if line.row == row else line.row, line.variant, line.unit, *_figures(line.ours)]
        table.add_row(*cells, *(_with(line) if companion else ()))
        row = line.row
    console.print(table)
    machine = result.machine
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}, "
        f"load {result.load_average[0]:.1f}, {result.measured_at}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in result.versions.items()))


def _with(line: Line) -> tuple[str, ...]:
    if line.peer is None or line.theirs is None or line.ratio is None:
        return ("",) * 5
    ratio, wanted = f"{line.ratio:.3f}", ""
    if line.wanted_ratio is not None:
        ratio = f"[{'green' if line.ratio <= line.wanted_ratio else 'red'}]{ratio}[/]"
        wanted = f"≤ {line.wanted_ratio:g}"
    return (line.peer, *_figures(line.theirs), ratio, wanted)


def _figures(figures: Measured) -> tuple[str, str]:
    if figures.samples == 1:
        return f"{figures.p50:,.2f}", ""
    return f"{figures.p50:,.2f}", f"{figures.p99:,.2f}"
