"""``kvrouter calibrate``."""

import os
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.flags import output_option
from kvrouter.commands.output import Output
from kvrouter.config.variables import ENGINE_KEY_VARIABLE
from kvrouter.core.secret import secret_variable

FILE = click.Path(path_type=Path)

REQUEST_LIMIT_S = 120.0
"""How long one request to a live engine may take."""


@click.command(short_help="Fit the timing of mock engines to a measured run of a real one, or to a live one.")
@click.argument("run", type=FILE, required=False)
@click.option(
    "--url", metavar="URL", help="Measure the live engine at http://HOST:PORT instead of reading RUN."
)
@click.option(
    "--requests",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Fit to the first N requests and predict the others; 0 fits nothing. With --url: send N, 10 to "
    "1000, and a third as many to predict.",
)
@click.option("--write-timing", type=FILE, metavar="FILE", help="Write the timing there, in YAML.")
@click.option(
    "--model-config",
    type=FILE,
    metavar="FILE",
    help="The model's config.json from Hugging Face; needed where the model's name is not known.",
)
@click.option("--model", metavar="NAME", help="With --url: the model, where the engine serves several.")
@click.option(
    "--engine",
    type=FILE,
    metavar="FOLDER",
    help="With --url: a folder with files of a RUN that say what the engine does not: meta.json, "
    "config.json, model.json.",
)
@click.option(
    "--request-limit-s",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=REQUEST_LIMIT_S,
    show_default=True,
    metavar="S",
    help="With --url: give up when one request takes longer.",
)
@output_option
def calibrate(
    run: Path | None,
    *,
    url: str | None,
    requests: int,
    write_timing: Path | None,
    output: Output,
    model_config: Path | None,
    model: str | None,
    engine: Path | None,
    request_limit_s: float,
) -> None:
    """Fit the timing of mock engines to RUN, a folder with an engine's flags, its GPUs and the times of its
    requests, and compare what they predict of the requests that were not seen with what was measured.

    With --url, the requests are sent to an OpenAI-compatible engine that serves nobody else meanwhile; a key
    that it asks for is taken from KVROUTER_ENGINE_API_KEY.

    `kvrouter replay --timing FILE` reads the timing.
    """
    if (run is None) == (url is None):
        raise click.UsageError("give either RUN or --url")
    if url is None and (model is not None or engine is not None):
        raise click.UsageError("--model and --engine: only with --url")

    from kvrouter.commands.calibrate import CalibrateOptions  # noqa: PLC0415
    from kvrouter.commands.calibrate import calibrate as fit  # noqa: PLC0415
    from kvrouter.commands.calibrate_engine import CalibrateEngineOptions, calibrate_engine  # noqa: PLC0415

    console = plain_console()
    if run is not None:
        fit(
            CalibrateOptions(
                run=run, n_seen=requests, write_timing=write_timing, model_config=model_config, output=output
            ),
            console,
        )
    elif url is not None:
        calibrate_engine(
            CalibrateEngineOptions(
                url=url,
                n_seen=requests,
                write_timing=write_timing,
                output=output,
                limit_s=request_limit_s,
                model=model,
                folder=engine,
                model_config=model_config,
                api_key=secret_variable(os.environ, ENGINE_KEY_VARIABLE),
            ),
            console,
        )
