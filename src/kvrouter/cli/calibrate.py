"""``kvrouter calibrate``."""

import os
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.commands.options import CalibrateOptions
from kvrouter.config.variables import ENGINE_KEY_VARIABLE
from kvrouter.core.secret import secret_variable


@click.command(short_help="Fit the timing of mock engines to a measured run of a real one, or to a live one.")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions, run: Path | None) -> None:
    """Fit the timing of mock engines to RUN, a folder with an engine's flags, its GPUs and the times of its
    requests, and compare what they predict of the requests that were not seen with what was measured.

    With --url, the requests are sent to an OpenAI-compatible engine that serves nobody else meanwhile; a key
    that it asks for is taken from KVROUTER_ENGINE_API_KEY.

    `kvrouter replay --timing FILE` reads the timing.
    """
    if (run is None) == (options.url is None):
        raise click.UsageError("give either RUN or --url")
    if options.url is None and (options.model is not None or options.folder is not None):
        raise click.UsageError("--model and --engine: only with --url")

    from kvrouter.commands.calibrate import calibrate as fit  # noqa: PLC0415
    from kvrouter.commands.calibrate_engine import calibrate_engine  # noqa: PLC0415

    if run is not None:
        fit(run, options, plain_console())
    elif options.url is not None:
        key = secret_variable(os.environ, ENGINE_KEY_VARIABLE)
        calibrate_engine(options.url, options, plain_console(), api_key=key)
