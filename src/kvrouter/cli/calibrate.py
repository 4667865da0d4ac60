"""``kvrouter calibrate``."""

from pathlib import Path

import click

FILE = click.Path(path_type=Path)


@click.command(short_help="Fit the timing of mock engines to a measured run of a real one.")
@click.argument("run", type=FILE)
@click.option(
    "--requests",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Fit to the first N requests and predict the others; 0 fits nothing.",
)
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the timing there, in YAML.")
def calibrate(run: Path, *, requests: int, output: Path | None) -> None:
    """Fit the timing of mock engines to RUN, a folder with an engine's flags, its GPUs and the times of its
    requests, and compare what they predict of the requests that were not seen with what was measured.

    `kvrouter replay --timing FILE` reads the timing.
    """
    from rich.console import Console  # noqa: PLC0415

    from kvrouter.commands.calibrate import CalibrateOptions  # noqa: PLC0415
    from kvrouter.commands.calibrate import calibrate as fit  # noqa: PLC0415

    console = Console()
    fit(
        CalibrateOptions(run=run, n_seen=requests, output=output),
        console if console.is_terminal else Console(width=140, no_color=True),
    )
