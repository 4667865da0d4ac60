"""``make bench-peers``: our figures next to the peers', in one run."""

import os
import sys
from pathlib import Path

import click

from benchmarks.comparison import measure_with
from benchmarks.frontend.rounds import Peers, measure_front_door
from benchmarks.peers.dynamo.frontend import DynamoFrontend
from benchmarks.peers.environment import ensure_environment, gateway_commands, gateway_versions
from benchmarks.report import measure_rows, open_console, report
from benchmarks.rows import FRONT_DOOR, choose
from benchmarks.sides import Side, SideCommand

OURS = SideCommand("ours", Path(sys.executable), "benchmarks.ours")


@click.command()
@click.option("--only", metavar="TEXT", help="Measure only the rows with this in their name; write no file.")
def main(only: str | None) -> None:
    """Make the peers' environment, measure every row, print the table, and write the result file."""
    chosen = choose(only)
    console = open_console()
    with console.status("the peers' environment"):
        python = ensure_environment()
    peers = Peers(gateway_commands(python), (DynamoFrontend(python),))
    theirs = SideCommand("dynamo", python, "benchmarks.peers.dynamo")
    load_average = os.getloadavg()
    with Side(OURS) as our_side, Side(theirs) as their_side:
        versions = {**our_side.versions(), **their_side.versions(), **gateway_versions(python)}
    lines = measure_rows(chosen.rows, lambda row: measure_with(row, OURS, theirs), console)
    if chosen.front_door:
        with console.status(FRONT_DOOR):
            lines += measure_front_door(OURS.python, peers)
    report("peers", lines, versions, load_average, console, keep=only is None)


if __name__ == "__main__":
    main()
