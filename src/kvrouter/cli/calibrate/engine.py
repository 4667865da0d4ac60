"""``kvrouter calibrate --url``: the timing of a live engine, from requests that are sent to it."""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console

from kvrouter.app.atomic_file import check_folder
from kvrouter.cli.calibrate.engine_description import EngineDescription, describe_engine
from kvrouter.cli.calibrate.engine_measurement import Measurement, MeasurementFailed, measure_engine
from kvrouter.cli.calibrate.flags import CalibrateOptions
from kvrouter.cli.calibrate.run import deliver, fitted_to
from kvrouter.cli.progress import working
from kvrouter.cli.timed_stream import Clock
from kvrouter.core.errors import ConfigError
from kvrouter.engines.attach import KeyRefused
from kvrouter.engines.openai.request_times import RequestTimes
from kvrouter.engines.openai.server import EngineServer
from kvrouter.fleetfile.fleet_engines import url_mistake
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE
from kvrouter.sim.calibrate.calibration import Calibrated, calibrate_from
from kvrouter.sim.calibrate.client_run import client_run
from kvrouter.sim.calibrate.engine_load import engine_load
from kvrouter.sim.calibrate.lone_requests import LONE_SPREADS, lone_timing
from kvrouter.sim.calibrate.measured_run import MeasuredRun
from kvrouter.sim.calibrate.model_shape import ModelShape, model_shape
from kvrouter.sim.calibrate.roofline import check_weights, roofline

CACHED_SHARE = 0.02
"""With a larger share of prompts from the engine's cache the prefill that was measured is too short."""


def calibrate_engine(
    url: str,
    options: CalibrateOptions,
    console: Console,
    *,
    api_key: str | None = None,
    clock: Clock = time.monotonic,
) -> None:
    """Measure the engine at ``url``, whose server may ask for ``api_key``; fit, write the timing, and print
    predicted against measured.

    Files are written only after all was measured and fitted. Raises ConfigError for options and files,
    WorkerUnreachable and MeasurementFailed, with the URL, for the engine's answers.
    """
    mistake = url_mistake(url)
    if mistake is not None:
        raise ConfigError(f"--url: {url}: {mistake}", param="url")
    if options.model_config is not None and not (
        options.folder is not None and (options.folder / "config.json").exists()
    ):
        raise ConfigError(
            "--model-config: needs --engine with a config.json: without the GPU the model says no times",
            param="model-config",
        )
    if options.write_timing is not None:
        check_folder(options.write_timing)
    options.output.check()
    with working("asking the engine") as progress:
        engine, shape, measured = asyncio.run(
            _measured(EngineServer(url, api_key=api_key), options, clock, progress.show)
        )
        try:
            run = client_run(
                engine.meta, engine.hardware, measured.requests, round_trip_s=measured.round_trip_s
            )
        except ConfigError as error:
            raise MeasurementFailed(f"{url}: {error.message}") from error
        calibrated = fit_engine(
            run, shape, options.n_fitted, lambda number: progress.show(f"fitting, round {number + 1}")
        )
        progress.show("predicting")
        fitted = fitted_to(url, engine.served_model, run, calibrated, _notes(engine, measured, run))
    deliver(fitted, options, console)


def fit_engine(
    run: MeasuredRun,
    shape: ModelShape | None,
    n_fitted: int,
    on_round: Callable[[int], None] = lambda _: None,
) -> Calibrated:
    """Fit a timing to a live engine's first ``n_fitted`` requests. The fit begins at the timing expected from
    the model's shape and the GPUs; without a shape, at that of the requests that ran alone.
    """
    if shape is not None:
        return calibrate_from(run, roofline(run, shape), n_fitted=n_fitted, on_round=on_round)
    prior = lone_timing(run, n_fitted)
    return calibrate_from(run, prior, n_fitted=n_fitted, spreads=LONE_SPREADS, on_round=on_round)


async def _measured(
    server: EngineServer, options: CalibrateOptions, clock: Clock, show: Callable[[str], None]
) -> tuple[EngineDescription, ModelShape | None, Measurement]:
    await server.open()
    try:
        try:
            engine = await describe_engine(server, model=options.model, folder=options.folder)
        except KeyRefused as error:
            raise ConfigError(
                f"{error.message}: give its key in {ENGINE_KEY_VARIABLE}", param="url"
            ) from error
        shape: ModelShape | None = None
        if engine.hardware is not None and options.folder is not None:  # mistakes there cost no measurement
            shape, _ = model_shape(engine.meta.model, options.folder, options.model_config)
            check_weights(engine.meta, engine.hardware, shape)
        load = engine_load(
            options.n_fitted,
            context_tokens=engine.context_tokens,
            kv_tokens=engine.kv_tokens,
            max_num_seqs=engine.meta.engine_kwargs.max_num_seqs,
        )
        measured = await measure_engine(
            server,
            engine.served_model,
            load,
            limit_s=options.request_limit_s,
            clock=clock,
            on_request=lambda n: show(f"measuring, {n} of {load.n_requests} requests"),
        )
        return engine, shape, measured
    finally:
        await server.close()


def _queues(times: RequestTimes) -> bool:
    """Whether requests waited for the scheduler for longer than they prefilled, all in all."""
    return (
        times.queue is not None and times.prefill is not None and times.queue.seconds > times.prefill.seconds
    )


def _notes(engine: EngineDescription, measured: Measurement, run: MeasuredRun) -> list[str]:
    """Return lines on the measured quantities, and on those that were not and cannot be separated."""
    n_known = sum(request.prefill_s is not None for request in measured.requests)
    times = measured.times
    lines = [f"{engine.served_model}: {run.n_requests} requests"]
    if n_known == len(measured.requests):
        lines.append("queue and service are separate in all requests, by what the engine says of each")
    elif n_known:
        lines.append(
            f"queue and service are separate in {n_known} requests that ran alone, by the engine's metrics; "
            "in the others only their sum is known, and the mean way to the scheduler"
        )
    else:
        lines.append(
            "queue and service cannot be separated: the engine has no times of its own; the way to its "
            f"scheduler was taken for {1e3 * measured.round_trip_s:.1f} ms"
        )
    means = [
        f"{name} {1e3 * of.mean_s:.2f} ms"
        for name, of in (("queue", times.queue), ("TTFT", times.ttft), ("between tokens", times.token))
        if of is not None and of.mean_s is not None
    ]
    if means:
        lines.append(f"the engine's own means over all requests: {', '.join(means)}")
    if not engine.states_flags and _queues(times):
        lines.append(
            "requests queued for longer than they prefilled, though all that are sent should run at once: "
            "max_num_seqs or max_num_batched_tokens is smaller than what is assumed, and the timing is wrong"
        )
    n_at_once = sum(request.came_at_once for request in measured.requests)
    if n_at_once:
        lines.append(
            f"{n_at_once} of {len(measured.requests)} answers came at once, and say nothing of decoding"
        )
    prompt_tokens = sum(request.prompt_tokens for request in measured.requests)
    if measured.cached_tokens > CACHED_SHARE * prompt_tokens:
        lines.append(
            f"{measured.cached_tokens} of {prompt_tokens} prompt tokens came from the engine's cache, though "
            "no prompt was sent twice: prefill is taken for faster than it is"
        )
    return [*lines, *engine.notes]
