"""Every example runs, and says what it is meant to say."""

import pytest

from tests.testing.attached_engines import BLOCK_SIZE, CONTEXT_TOKENS, config
from tests.testing.engine_requests import MODEL
from tests.testing.example_programs import EXAMPLES, TWO_SERVERS, check_two_servers, output_of_example
from tests.testing.small_engine import small_engine
from tests.testing.small_engine_protocols import VllmProtocol

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
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS) | RUN_WITH_ENGINES | {TWO_SERVERS}


@pytest.mark.parametrize("name", sorted(SAYS))
async def test_the_example_runs_and_prints_its_output(name: str) -> None:
    assert SAYS[name] in await output_of_example(name)


async def test_a_router_over_two_vllm_servers_sends_a_prompt_again_where_it_is_cached() -> None:
    tongue = VllmProtocol(CONTEXT_TOKENS)
    async with small_engine(tongue, config()) as one, small_engine(tongue, config()) as two:
        await check_two_servers([one.url, two.url], model=MODEL, block_size=BLOCK_SIZE)
    lines = (EXAMPLES / f"{TWO_SERVERS}.py").read_text("utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 30
