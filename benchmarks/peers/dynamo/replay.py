"""Dynamo's offline replay of Mooncake rows by its KV router; its summary goes to a file as JSON.

Arguments: the trace, ``aggregated`` or ``disaggregated``, workers (of each role), tokens a block, blocks a
worker, the file.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dynamo.mocker import config
from dynamo.mocker.args import parse_args
from dynamo.replay import run_trace_replay


def engine(block: str, blocks: str, *role: str) -> Any:
    """An engine of vLLM's kind with the default timing."""
    arguments = ["--engine-type", "vllm", "--block-size", block, "--num-gpu-blocks", blocks]
    return config.build_mocker_engine_args(parse_args([*arguments, "--max-model-len", "1000000", *role]))


def main() -> None:
    """Replay and write the summary."""
    trace, shape, workers, block, blocks, path = sys.argv[1:]
    options: dict[str, Any] = {"trace_block_size": int(block), "router_mode": "kv_router"}
    if shape == "aggregated":
        options |= {"extra_engine_args": engine(block, blocks), "num_workers": int(workers)}
    else:
        for role in ("prefill", "decode"):
            options[f"{role}_engine_args"] = engine(block, blocks, "--disaggregation-mode", role)
            options[f"num_{role}_workers"] = int(workers)
    Path(path).write_text(json.dumps(run_trace_replay(trace, **options).summary), encoding="utf-8")


if __name__ == "__main__":
    main()
