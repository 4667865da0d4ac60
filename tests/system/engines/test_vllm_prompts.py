"""Calls of many shapes to a real vLLM: the router counts the tokens that the engine counts, and predicts at a
repeat the blocks that the engine finds in its cache.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.system.engines.calls import attached, stopped
from tests.system.engines.prompt_law import blind_shapes, kept_prompts, made_again, model_with_template
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.processes import Fleet
from tests.testing.prompt_shapes import SHAPES
from tests.testing.prompt_templates import TEMPLATES


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine, whose template shows all that it gets."""
    model = model_with_template(engine_folder)
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        await one[1].start(model=model, n_blocks=1500, flags=flags)
        yield one[1]


async def test_predicted_cache_hits_match_vllm_for_every_shape(engine: VllmServer, kvrouter: Fleet) -> None:
    frontend = await attached(kvrouter, {1: engine})
    assert await blind_shapes(frontend, SHAPES, block_size=BLOCK_SIZE) == {}


async def test_predicted_cache_hits_match_with_engine_side_tokenizing(
    engine: VllmServer, kvrouter: Fleet
) -> None:
    patient = ("--tokenize-engine-wait-s", "10")
    flags = ("--tokenizer", "engine")
    frontend = await attached(kvrouter, {1: engine}, *flags, frontend_flags=patient)
    blind = await blind_shapes(frontend, SHAPES, block_size=BLOCK_SIZE)
    assert blind.keys() == {"responses-called"}  # of chats alone vLLM orders the fields of calls of tools
    (model,) = (await frontend.fleet())["models"]
    assert (model["tokenized_by"], model["routing"]) == ("engine", "cache")


@pytest.mark.parametrize("template", TEMPLATES)
def test_recorded_renderings_equal_vllms(template: str) -> None:
    assert made_again("vllm_renderings.py", template) == kept_prompts("vllm-0.32.0")[template]
