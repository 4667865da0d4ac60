"""``make bench``: our own figures."""

import os
import sys
from pathlib import Path

import click

from benchmarks.comparison import measure_alone
from benchmarks.report import measure_rows, open_console, report
from benchmarks.rows import chosen_rows
from benchmarks.sides import Side, SideCommand

OURS = SideCommand("ours", Path(sys.executable), "benchmarks.ours")


@click.command()
@click.option("--only", metavar="TEXT", help="Measure only the rows with this in their name; write no file.")
def main(only: str | None) -> None:
    """Measure every row, print the table, and write the result file."""
    rows = chosen_rows(only)
    load_average = os.getloadavg()
    with Side(OURS) as side:
        versions = side.versions()
    console = open_console()
    lines = measure_rows(rows, lambda row: measure_alone(row, OURS), console)
    report("ours", lines, versions, load_average, console, keep=only is None)


if __name__ == "__main__":
    main()
