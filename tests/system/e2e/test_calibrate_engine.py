"""``kvrouter calibrate --url`` against a mock engine behind ``kvrouter up``, as its user types it."""

import asyncio
from pathlib import Path

import pytest
import yaml

from kvrouter.cli import main
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.timing_file import read_timing
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import mock_server

TIMING = (
    "timing: {prefill_quadratic: 0, prefill_base: 1, decode_quadratic: 0, decode_linear: 0, decode_base: 8}"
)


async def test_a_live_engine_is_measured_and_its_timing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timing.yaml"
    async with mock_server(uniform_fleet(replicas=1, engine=f"{{{TIMING}}}", speedup=1.0)) as here:
        arguments = ["calibrate", "--url", here.url, "--requests", "10", "--write-timing", str(path)]
        assert await asyncio.to_thread(main, arguments) == 0
        metrics = await here.metrics()
        served_n = metrics.value("requests_total", status="200")
        assert served_n == 3 + 10 + 5, "to warm up, to fit to, to predict"
    timing = read_timing(path)
    # How long anything took here depends on the machine; that no step is shorter than the engine's does not.
    assert timing.decode_ms(0.0, 1, 100) > 2.0
    assert set(yaml.safe_load(path.read_text())) == set(Timing.__struct_fields__)
    output = capsys.readouterr().out
    assert "5 requests, predicted from 10" in output
    assert "queue and service cannot be separated" in output
    assert "no request seen" not in output


async def test_calibrate_shows_the_servers_error_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timing.yaml"
    async with mock_server(uniform_fleet(replicas=1)) as here:
        url = here.url
        arguments = ["calibrate", "--url", here.url, "--model", "other", "--write-timing", str(path)]
        assert await asyncio.to_thread(main, arguments) == 2
        assert f"--model: {here.url} serves mock, not 'other'" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["calibrate", "--url", url, "--write-timing", str(path)]) == 1
    assert f"{url}/v1/models: " in capsys.readouterr().err
    assert await asyncio.to_thread(path.exists) is False
