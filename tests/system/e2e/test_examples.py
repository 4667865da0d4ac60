"""Every example runs, and says what it is meant to say."""

import asyncio
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"

SAYS = {
    "book_by_hand": "booked",
    "generate": "20 blocks there",
    "join_workers": "which holds 10 blocks of the prompt",
    "least_ttft": "rank 0",
    "own_engine": "holds 6 blocks of it\nthe same prompt goes to worker 2: 6 blocks are there",
    "plain_client": "round_robin [",
    "query_then_route": "for 20 blocks",
    "split_fleet": "as a pair: [",
}


RUN_WITH_ENGINES = {"vllm_in_process"}
"""Examples that need a real engine: the tests of real engines run them."""


def test_the_list_of_examples_is_complete() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS) | RUN_WITH_ENGINES


@pytest.mark.parametrize("name", sorted(SAYS))
async def test_the_example_runs_and_prints_its_output(name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / f"{name}.py"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert SAYS[name] in out.decode()
