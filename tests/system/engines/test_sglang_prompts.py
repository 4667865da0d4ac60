"""Calls of many shapes to a real SGLang."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.system.engines.calls import attached, stopped
from tests.system.engines.prompt_law import blind_shapes, kept_prompts, made_again, model_with_template
from tests.system.engines.sglang_server import PAGE_SIZE, SglangServer
from tests.testing.processes import Fleet
from tests.testing.prompt_shapes import SHAPES
from tests.testing.prompt_templates import TEMPLATES

_KEPT = kept_prompts("sglang-0.5.23")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[SglangServer]:
    """One engine, whose template shows all that it gets."""
    async with stopped({1: SglangServer(engine_folder, "sglang", core=0)}) as one:
        await one[1].start(model=model_with_template(engine_folder), n_tokens=32_768)
        yield one[1]


async def test_predicted_cache_hits_match_sglang_for_every_shape(
    engine: SglangServer, kvrouter: Fleet
) -> None:
    frontend = await attached(kvrouter, {1: engine})
    shapes = [shape for shape in SHAPES if isinstance(_KEPT["text"][shape.name], str)]
    assert await blind_shapes(frontend, shapes, block_size=PAGE_SIZE) == {}


@pytest.mark.parametrize("template", TEMPLATES)
def test_recorded_renderings_equal_sglangs(template: str) -> None:
    assert made_again("sglang_renderings.py", template) == _KEPT[template]
