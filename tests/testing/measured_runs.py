"""Measured runs that a mock engine made: what a real engine's folder would hold."""

import json
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.engine_run import engine_config, simulate
from kvrouter.sim.calibrate.measured_run import MeasuredRun, Stamps, read_run

MODEL = "meta-llama/Llama-3.1-8B"
META: dict[str, object] = {
    "model": MODEL,
    "vllm_version": "0.19.0",
    "engine_kwargs": {"max_num_seqs": 12, "max_num_batched_tokens": 1024, "max_model_len": None},
}
HARDWARE: dict[str, object] = {
    "nodes": [
        {
            "instances": [
                {"hardware": "RTXPRO6000", "npu_mem": {"mem_size": 96, "mem_bw": 1597, "mem_util": 0.9}}
            ]
        }
    ]
}
ENGINE_CLOCK_S = 479_748.25
"""The engine's clock began at another moment than that of the arrivals."""


def written_run(
    folder: Path,
    timing: Timing,
    *,
    n_requests: int = 60,
    seed: int = 0,
    blocks: int = 31_250,
    memory_gib: float = 96,
) -> MeasuredRun:
    """Write the run of a mock engine with this timing and these KV blocks into ``folder``, and read it. The
    GPU is said to have ``memory_gib``.
    """
    draws = np.random.default_rng(seed)
    rows = [
        {
            "request_id": f"r{number}",
            "input_toks": int(draws.integers(40, 2_500)),
            "output_toks": int(draws.integers(2, 120)),
            "arrival_time": 1_777_142_838.0 + float(arrival_s),
            **dict.fromkeys(("queued_ts", "scheduled_ts"), ENGINE_CLOCK_S),
            **dict.fromkeys(("first_token_ts",), ENGINE_CLOCK_S + 1.0),
            **dict.fromkeys(("last_token_ts",), ENGINE_CLOCK_S + 2.0),
        }
        for number, arrival_s in enumerate(np.cumsum(draws.exponential(0.12, n_requests)))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(META))
    hardware = json.dumps(HARDWARE).replace('"mem_size": 96', f'"mem_size": {memory_gib}')
    (folder / "config.json").write_text(hardware)
    _write_rows(folder, rows)
    run = read_run(folder)
    stamps = simulate(
        run, replace(engine_config(run, blocks * run.meta.engine_kwargs.block_size), timing=timing)
    )
    _write_rows(folder, [row | _stamped(stamps, number) for number, row in enumerate(rows)])
    return read_run(folder)


def _stamped(stamps: Stamps, number: int) -> dict[str, float]:
    columns = {
        "queued_ts": stamps.queued,
        "scheduled_ts": stamps.scheduled,
        "first_token_ts": stamps.first,
        "last_token_ts": stamps.last,
    }
    return {name: ENGINE_CLOCK_S + float(column[number]) for name, column in columns.items()}


def _write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
