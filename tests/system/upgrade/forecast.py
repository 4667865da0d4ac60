"""What ``kvrouter worth`` forecasts of an upgrade, from its own recorded traffic."""

import asyncio
import sys
from pathlib import Path

from tests.system.engines.real_engine import MODEL, RealEngine
from tests.system.engines.vllm_server import BLOCK_SIZE
from tests.testing.processes import CLI

BLOCKS = 36
"""KV blocks of each engine: a cache holds a few of the calls, so that most are prefilled again."""

FLEET = f"""version: 1
models: [{{name: {MODEL}, block_size: {BLOCK_SIZE}}}]
topology: {{levels: [host], links: {{across: {{latency_s: 0.002, bandwidth_bytes_per_s: 3.125e+9}}}}}}
workers:
- {{name: prefill, role: prefill, replicas: 2, engine: {{total_kv_blocks: {BLOCKS}}}}}
- {{name: decode, role: decode, replicas: 2, engine: {{total_kv_blocks: {BLOCKS}}}}}
"""
"""The engines as mock ones, with a fleet's usual links: those of the test are one host's."""

STEPS = ("50/0", "50", "100/50")
"""Percent of prefill and of decode that are upgraded after each restart but the last."""


async def print_forecast(recording: Path, engine: RealEngine) -> None:
    """Measure an engine, which serves nobody else now, and print what the steps of the upgrade change for the
    requests of a recording.
    """
    fleet, timing = recording.parent / "fleet.yaml", recording.parent / "timing.yaml"
    fleet.write_text(FLEET)
    await _run("calibrate", "--url", engine.url, "--write-timing", str(timing))
    upgraded = [argument for step in STEPS for argument in ("--upgraded", step)]
    printed = await _run(
        *("worth", str(recording), "--fleet", str(fleet), "--timing", str(timing), "--events", "none"),
        *("--mode", "kv", "--cost", "time", *upgraded),
    )
    print(printed, flush=True)


async def _run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLI, *arguments), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode()
