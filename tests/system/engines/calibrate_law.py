"""What holds for a real engine that ``kvrouter calibrate --url`` measures, as its user types it.

A module of tests subclasses :class:`CalibrateLaw` and has the fixtures ``engine`` and ``says``: what the
command says of the engine's own times. How long anything took depends on the machine: no test looks at it.
"""

import asyncio
import os
from pathlib import Path

import pytest
import yaml

from kvrouter.cli import main
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.timing_file import read_timing
from tests.system.engines.real_engine import MODEL, RealEngine

N_FITTED = 10
N_SENT = 3 + N_FITTED + 5
"""To warm up, to fit to, to predict."""


async def calibrate(engine: RealEngine, path: Path, *arguments: str) -> int:
    """The exit status of the command."""
    return await asyncio.to_thread(
        main,
        [
            "calibrate",
            "--url",
            engine.url,
            "--requests",
            str(N_FITTED),
            "--write-timing",
            str(path),
            *arguments,
        ],
    )


class CalibrateLaw:
    """The tests."""

    async def test_a_calibrated_timing_is_valid_for_replay(
        self, engine: RealEngine, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "timing.yaml"
        assert await calibrate(engine, path) == 0
        output = capsys.readouterr().out
        assert f"{N_SENT - 3 - N_FITTED} requests, predicted from {N_FITTED}" in output
        assert f"{MODEL}: {N_SENT - 3} requests" in output
        assert says in output
        assert "came from the engine's cache" not in output
        written = path.read_text()
        assert says in written
        assert f"block_size of its model: {engine.block_size}" in written
        assert set(yaml.safe_load(written)) == set(Timing.__struct_fields__)
        timing = read_timing(path)
        assert 0.0 < timing.decode_ms(0.0, 1, 100) <= timing.decode_ms(0.0, 8, 800)
        assert 0.0 < timing.prefill_ms(100, 5_000) <= timing.prefill_ms(1_000, 500_000)

    async def test_calibrate_refuses_an_engine_under_other_load(
        self, engine: RealEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def serve_another() -> None:
            while True:
                await engine.complete([9, 8, 7], max_tokens=64, ignore_eos=True)

        another = asyncio.create_task(serve_another())
        try:
            assert await calibrate(engine, tmp_path / "timing.yaml") == 1
        finally:
            another.cancel()
            await asyncio.gather(another, return_exceptions=True)
        assert "others use it, and their load would be measured too" in capsys.readouterr().err
        assert await asyncio.to_thread(os.listdir, tmp_path) == []

    async def test_calibrate_refuses_another_model_by_name(
        self, engine: RealEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert await calibrate(engine, tmp_path / "timing.yaml", "--model", "other") == 2
        assert f"--model: {engine.url} serves {MODEL}, not 'other'" in capsys.readouterr().err
