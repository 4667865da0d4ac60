"""The commands about where a worker is: ``topology check`` and ``topology wait``."""

import os
import signal
import sys
from types import FrameType

import click

TERMINATED = 128 + signal.SIGTERM


@click.group()
def topology() -> None:
    """Where a worker is."""


@topology.command("check")
def topology_check() -> None:
    """Print what a worker would publish from its environment and label files, or why it would not start."""
    from kvrouter.worker.topology import topology_check as check  # noqa: PLC0415

    report = check(os.environ)
    click.echo(report.text)
    sys.exit(report.exit_code)


@topology.command("wait", short_help="Wait until the label files are there.")
@click.option(
    "--mount-path",
    metavar="FOLDER",
    help="The folder of the files.  [DYN_TOPOLOGY_MOUNT_PATH; default: /etc/dynamo/topology]",
)
@click.option(
    "--levels",
    metavar="LEVEL[,…]",
    help="The levels whose files must have a value.  [default: the one that a worker with this environment "
    "would wait for]",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="LEVEL=KEY",
    help="The pod label that a level's file shows, for what is told of it.  [default: "
    "grove.io/topology.LEVEL]",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, max=86_400),
    default=300.0,
    show_default=True,
    help="How long to wait; 0 looks once.",
)
def topology_wait(
    mount_path: str | None, levels: str | None, labels: tuple[str, ...], timeout_s: float
) -> None:
    """Wait until every level's file has a value: the init container of a worker's pod.

    It ends with 0 once they have, and with 1 and the usual causes when they never do. Every few seconds it
    tells what it waits for.
    """
    from kvrouter.worker.topology_wait import awaited, wait_for_levels  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _end)
    wanted = awaited(os.environ, mount_path=mount_path, levels=levels, labels=labels)
    wait_for_levels(wanted, timeout_s=timeout_s, say=click.echo)


def _end(_number: int, _frame: FrameType | None) -> None:
    """A container's first process is not ended by SIGTERM unless it says so itself."""
    sys.exit(TERMINATED)
