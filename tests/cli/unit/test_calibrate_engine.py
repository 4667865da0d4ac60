"""``kvrouter calibrate --url``: what it writes and says of an engine, and where its fit begins."""

import asyncio
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvrouter.cli.calibrate.engine import calibrate_engine, fit_engine
from kvrouter.cli.calibrate.engine_measurement import MeasurementFailed
from kvrouter.cli.calibrate.flags import CalibrateOptions
from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.timing_file import read_timing
from kvrouter.sim.calibrate.client_run import client_run
from kvrouter.sim.calibrate.engine_load import engine_load
from kvrouter.sim.calibrate.measured_run import RunHardware, read_json
from kvrouter.sim.calibrate.model_shape import model_shape
from kvrouter.sim.calibrate.roofline import roofline
from tests.testing.client_measurements import META, client_requests
from tests.testing.measured_runs import HARDWARE, MODEL
from tests.testing.measured_runs import META as META_FILE
from tests.testing.scripted_engine import scripted_engine
from tests.testing.timed_engine import PREFILL_S, Fault, TimedEngine, timed_engine


def options(path: Path, **others: object) -> CalibrateOptions:
    given: dict[str, object] = {"n_fitted": 12, "request_limit_s": 60.0, **others}
    return CalibrateOptions(write_timing=path, **given)  # type: ignore[arg-type]


async def calibrated(engine: TimedEngine, path: Path, **others: object) -> str:
    """What the command prints."""
    output = io.StringIO()
    console = Console(file=output, width=200, no_color=True)
    async with timed_engine(engine):
        await asyncio.to_thread(
            calibrate_engine, engine.url, options(path, **others), console, clock=engine.clock
        )
    return output.getvalue()


async def test_stated_engine_facts_are_written_and_assumed_ones_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "timing.yaml"
    engine = TimedEngine()
    output = await calibrated(engine, path)
    assert read_timing(path).decode_base > 0.0
    comments = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    for words in (
        "queue and service are separate in 3 requests that ran alone",
        "max_num_seqs 256, max_num_batched_tokens 8192 and async_scheduling false: the engine does not say",
        "the engine's own means over all requests: queue 50.00 ms",
    ):
        assert words in output
        assert words in comments
    assert f"by the first 12 requests of {engine.url}" in comments
    assert "total_kv_blocks: 2000" in comments
    assert "block_size of its model: 16" in comments


async def test_engine_times_of_each_answer_separate_queue_and_service(tmp_path: Path) -> None:
    output = await calibrated(TimedEngine(says_times=True), tmp_path / "timing.yaml")
    assert "queue and service are separate in all requests, by what the engine says of each" in output
    assert "service TTFT" in output


async def test_long_queueing_is_noted_where_engine_seats_are_assumed(tmp_path: Path) -> None:
    queues = "requests queued for longer than they prefilled"
    engine = TimedEngine(queue_s=2.0 * PREFILL_S)
    assert queues in await calibrated(engine, tmp_path / "timing.yaml")
    assert queues in (tmp_path / "timing.yaml").read_text()
    assert queues not in await calibrated(TimedEngine(), tmp_path / "timing.yaml")
    (tmp_path / "meta.json").write_text(json.dumps(META_FILE))
    known = TimedEngine(queue_s=2.0 * PREFILL_S)
    assert queues not in await calibrated(known, tmp_path / "timing.yaml", folder=tmp_path)


async def test_answer_that_came_at_once_is_left_out_with_a_note(tmp_path: Path) -> None:
    output = await calibrated(TimedEngine(held_back=5), tmp_path / "timing.yaml")
    assert "1 of 17 answers came at once, and say nothing of decoding" in output


async def test_missing_engine_key_is_asked_for_by_its_variable(tmp_path: Path) -> None:
    async with scripted_engine() as engine:
        engine.set_page("/v1/models", '{"error":"Unauthorized"}', status=401)
        with pytest.raises(ConfigError, match="answered 401: Unauthorized: give its key in KVROUTER_ENGINE"):
            await asyncio.to_thread(
                calibrate_engine, engine.url, options(tmp_path / "t.yaml"), Console(file=io.StringIO())
            )


async def test_queue_and_service_are_reported_as_one_without_engine_metrics(tmp_path: Path) -> None:
    output = await calibrated(TimedEngine(has_metrics=False), tmp_path / "timing.yaml")
    assert "queue and service cannot be separated: the engine has no times of its own" in output
    assert "guessed: the engine's KV blocks" in output


async def test_failed_measurement_writes_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "timing.yaml"
    path.write_text("before")
    with pytest.raises(MeasurementFailed, match="no such parameter"):
        await calibrated(TimedEngine(fault=Fault.REFUSED), path)
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["timing.yaml"]
    assert path.read_text() == "before"


async def test_too_few_requests_are_refused_before_any_is_sent(tmp_path: Path) -> None:
    engine = TimedEngine()
    with pytest.raises(ConfigError, match="9 are too few to measure"):
        await calibrated(engine, tmp_path / "timing.yaml", n_fitted=9)
    assert engine.calls == []


async def test_insufficient_engine_files_are_refused_before_any_measurement(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HARDWARE))
    meta = {"model": "someone/thing", "engine_kwargs": {}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    engine = TimedEngine()
    with pytest.raises(ConfigError, match="nothing is known of 'someone/thing'"):
        await calibrated(engine, tmp_path / "timing.yaml", folder=tmp_path)
    assert engine.calls == []
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"model": "meta-llama/Llama-3.1-70B"}))
    engine = TimedEngine(has_metrics=False)
    with pytest.raises(ConfigError, match="no room for KV"):
        await calibrated(engine, tmp_path / "timing.yaml", folder=tmp_path)
    assert engine.calls == []


def test_fit_for_a_known_gpu_begins_at_its_expected_timing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HARDWARE))
    hardware = read_json(tmp_path / "config.json", RunHardware)
    load = engine_load(12, context_tokens=2_048)
    truth = Timing(prefill_quadratic=0.0, decode_quadratic=0.0, decode_linear=0.0, decode_base=12.0)
    meta = type(META)(model=MODEL, vllm_version="0.19.0", engine_kwargs=META.engine_kwargs)
    run = client_run(meta, hardware, client_requests(load, truth), round_trip_s=0.0)
    shape, _ = model_shape(MODEL, tmp_path)
    expected = roofline(run, shape)
    assert fit_engine(run, shape, 12).expected.timing == expected.timing
    unknown = client_run(meta, None, client_requests(load, truth), round_trip_s=0.0)
    assert fit_engine(unknown, None, 12).expected.timing != expected.timing
