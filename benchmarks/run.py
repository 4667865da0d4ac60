"""``make bench``: our own figures."""

import os
import sys
from pathlib import Path

import click

from benchmarks.comparison import measure_alone
from benchmarks.frontend.rounds import measure_front_door
from benchmarks.report import measure_rows, open_console, report
from benchmarks.rows import FRONT_DOOR, choose
from benchmarks.sides import Side, SideCommand

OURS = SideCommand("ours", Path(sys.executable), "benchmarks.ours")


@click.command()
@click.option("--only", metavar="TEXT", help="Measure only the rows with this in their name; write no file.")
def main(only: str | None) -> None:
    """Measure every row, print the table, and write the result file."""
    chosen = choose(only)
    load_average = os.getloadavg()
    with Side(OURS) as side:
        versions = side.versions()
    console = open_console()
    lines = measure_rows(chosen.rows, lambda row: measure_alone(row, OURS), console)
    if chosen.front_door:
        with console.status(FRONT_DOOR):
            lines += measure_front_door(OURS.python)
    report("ours", lines, versions, load_average, console, keep=only is None)


if __name__ == "__main__":
    main()
