"""``python -m benchmarks.instructions``: count, print, and compare with the last row of the data.

Exits with 1 if a figure grew by more than 5 %, also when all is counted once more: on a machine that has
other work, bytes may arrive in more pieces. With --keep it adds a row, for later commits.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import click
from rich.console import Console
from rich.table import Table

from benchmarks.http_replay.machine import this_commit
from benchmarks.instructions.count import Figures, count_decisions, count_requests
from benchmarks.instructions.instruments import (
    Callgrind,
    Instrument,
    PythonCalls,
    SystemCalls,
    valgrind_version,
    why_no_ptrace,
)
from benchmarks.instructions.marks import DYNAMO
from benchmarks.instructions.rows import (
    FILE,
    Measured,
    Row,
    append_row,
    compare,
    read_rows,
    this_build,
    this_python,
)
from benchmarks.peers.environment import ensure_environment


def count_all(instruments: list[Callable[[], Instrument]]) -> Figures:
    """Count with each instrument, two processes at a time."""
    figures: Figures = {}
    with ThreadPoolExecutor(2) as threads:
        counts = [
            threads.submit(count, make) for make in instruments for count in (count_requests, count_decisions)
        ]
        for each in counts:
            for operation, counted in each.result().items():
                figures.setdefault(operation, {}).update(counted)
    return figures


def least(first: Figures, second: Figures) -> Figures:
    """Return the lesser of each figure."""
    return {
        operation: {what: min(figure, second[operation][what]) for what, figure in counts.items()}
        for operation, counts in first.items()
    }


def _measured(figures: Figures) -> Measured:
    return {
        operation: {what: round(figure.cost, 2) for what, figure in counts.items()}
        for operation, counts in figures.items()
    }


def show(console: Console, figures: Figures, last: Row | None) -> None:
    """Print each figure, its noise, and how it differs from the last row's."""
    table = Table("operation", "counted", "here", "noise", "last row", "difference")
    for operation, counts in figures.items():
        for what, figure in counts.items():
            before = None if last is None else last.figures.get(operation, {}).get(what)
            was = "" if before is None else f"{before:,.1f}"
            grown = f"{figure.cost / before - 1:+.2%}" if before else ""
            table.add_row(operation, what, f"{figure.cost:,.1f}", f"{figure.noise:.2%}", was, grown)
    console.print(table)


@click.command(help=__doc__)
@click.option("--keep", metavar="REASON", help="Add a row with these figures to the data.")
@click.option(
    "--dynamo", is_flag=True, help="Count Dynamo's decisions, in the environment of bench-peers, alone."
)
def main(keep: str | None, *, dynamo: bool) -> None:
    """Count, print, and compare or keep."""
    console = Console(width=130)
    valgrind = valgrind_version()
    if dynamo:
        if valgrind is None:
            raise click.ClickException("--dynamo: valgrind is not installed")
        show(console, count_decisions(Callgrind, (DYNAMO,), str(ensure_environment())), None)
        return
    no_ptrace = why_no_ptrace()
    instruments: list[Callable[[], Instrument]] = []
    if valgrind is None:
        console.print("SKIPPED: instructions and allocations: valgrind is not installed")
    else:
        instruments.append(Callgrind)
    if no_ptrace is None:
        instruments.append(SystemCalls)
    else:
        console.print(f"SKIPPED: system calls and turns: {no_ptrace}")
    instruments.append(PythonCalls)
    rows = read_rows(FILE) if FILE.is_file() else []
    figures = count_all(instruments)
    last = rows[-1] if rows else None
    show(console, figures, last)
    build = this_build(valgrind)
    if keep is not None:
        if not keep.strip():
            raise click.UsageError("--keep: say why the figures change")
        append_row(FILE, Row(this_commit("src", "native"), keep, this_python(), build, _measured(figures)))
        console.print(f"added a row to {os.path.relpath(FILE)}")
        return
    if last is None:
        raise click.ClickException(f"{os.path.relpath(FILE)} has no row to compare with")
    compared = compare(last, _measured(figures), python=this_python(), build=build)
    if not compared.is_good:
        console.print("counting once more")
        figures = least(figures, count_all(instruments))
        compared = compare(last, _measured(figures), python=this_python(), build=build)
    for line in compared.lines:
        console.print(line, soft_wrap=True)
    if not compared.is_good:
        console.print(
            'If this is what it should cost: make bench-instructions REASON="why", and commit the row.',
            soft_wrap=True,
        )
        sys.exit(1)
    console.print(f"no figure grew by more than 5 % since {last.commit.id}")


if __name__ == "__main__":
    main()
