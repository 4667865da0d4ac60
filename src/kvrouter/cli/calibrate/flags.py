"""The command line of ``kvrouter calibrate``: its options and its help."""

import os
from dataclasses import dataclass
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output
from kvrouter.core.secret import secret_variable
from kvrouter.settings.option import option
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """How a timing is fitted: to the first ``n_fitted`` requests of a run, or of those sent to ``url``.

    ``folder`` has files of a run that say what a live engine does not.
    """

    url: str | None = option(
        "Measure the live engine at http://HOST:PORT instead of reading RUN.", metavar="URL"
    )
    n_fitted: int = option(
        "Fit to the first N requests and predict the others; 0 fits nothing. With --url: send N, 10 to "
        "1000, and a third as many to predict.",
        default=30,
        flag="--requests",
        metavar="N",
        at_least=0,
    )
    write_timing: Path | None = option("Write the timing there, in YAML.", metavar="FILE")
    model_config: Path | None = option(
        "The model's config.json from Hugging Face; needed where the model's name is not known.",
        metavar="FILE",
    )
    model: str | None = option("With --url: the model, where the engine serves several.", metavar="NAME")
    folder: Path | None = option(
        "With --url: a folder with files of a RUN that say what the engine does not: meta.json, "
        "config.json, model.json.",
        flag="--engine",
        metavar="FOLDER",
    )
    request_limit_s: float = option(
        "With --url: give up when one request takes longer.",
        default=120.0,
        metavar="S",
        above=0,
        at_most=86_400,
    )
    output: Output = TABLE


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

    from kvrouter.cli.calibrate.engine import calibrate_engine  # noqa: PLC0415
    from kvrouter.cli.calibrate.run import calibrate as fit  # noqa: PLC0415

    if run is not None:
        fit(run, options, plain_console())
    elif options.url is not None:
        key = secret_variable(os.environ, ENGINE_KEY_VARIABLE)
        calibrate_engine(options.url, options, plain_console(), api_key=key)
