"""Calls of many shapes to a real vLLM: the router counts the tokens that the engine counts, and predicts at a
repeat the blocks that the engine finds in its cache.
"""

import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvrouter.core.requests import CallRoute
from tests.engines.calls import attached, index_is_settled, stopped
from tests.engines.install import HERE, engines_dir
from tests.engines.real_engine import MODEL
from tests.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.support.processes import Fleet, Frontend
from tests.support.prompt_shapes import SHAPES, Shape, lengthened
from tests.support.prompt_templates import TEMPLATES

WORDS = 120
_ISL = re.compile(r" decision .*?isl_tokens=(\d+)")
_DATA = HERE.parent / "data" / "engine-prompts" / "vllm-0.32.0.json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine, whose template shows all that it gets."""
    model = engine_folder / "model"
    model.mkdir()
    for path in (engines_dir() / "model").iterdir():
        if path.name != "chat_template.jinja":
            (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(TEMPLATES["text"])
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        await one[1].start(model=model, n_blocks=1500, flags=flags)
        yield one[1]


class _Seen:
    """What router and engine say of one answer."""

    def __init__(self, answer: dict[str, Any], overlap_blocks: int, isl_tokens: int) -> None:
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = usage.get("cache_read_input_tokens", 0)
        self.engine_cached = details.get("cached_tokens", cached)
        apart = cached + usage.get("cache_creation_input_tokens", 0)
        self.engine_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0) + apart)
        self.predicted = min(overlap_blocks, (isl_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE
        self.isl_tokens = isl_tokens

    def as_text(self) -> str:
        return f"isl {self.isl_tokens}/{self.engine_tokens}, cached {self.predicted}/{self.engine_cached}"


_LIMITS = {CallRoute.RESPONSES: "max_output_tokens"}


async def _ask(frontend: Frontend, shape: Shape) -> _Seen:
    body = {"model": MODEL, _LIMITS.get(shape.route, "max_tokens"): 2, "temperature": 0, **shape.body}
    logged = frontend.log.stat().st_size
    answer = await frontend.http.post(shape.route.value, json=body)
    assert answer.status_code == 200, f"{shape.name}: {answer.text}"
    decided = _ISL.search(frontend.log.read_text(errors="replace")[logged:])
    assert decided is not None
    overlap = int(answer.headers["x-kvrouter-overlap-blocks"])
    return _Seen(answer.json(), overlap, int(decided[1]))


@pytest.mark.asyncio(loop_scope="module")
async def test_every_shape_is_found_where_the_engine_has_it(engine: VllmServer, kvrouter: Fleet) -> None:
    frontend = await attached(kvrouter, {1: engine})
    shapes = [lengthened(shape, WORDS) for shape in SHAPES]
    for shape in shapes:
        await _ask(frontend, shape)
    await index_is_settled(frontend)
    seen = {shape.name: await _ask(frontend, shape) for shape in shapes}
    blind = {
        name: found.as_text()
        for name, found in seen.items()
        if found.isl_tokens != found.engine_tokens
        or found.predicted != found.engine_cached
        or found.predicted < 2 * BLOCK_SIZE
    }
    assert not blind
    assert len(seen) >= 40


def test_the_kept_renderings_are_the_engines() -> None:
    kept = json.loads(_DATA.read_text("utf-8"))["prompts"]
    for name, template in TEMPLATES.items():
        asked = {
            "template": template,
            "shapes": [[shape.name, shape.route.value, shape.body] for shape in SHAPES],
        }
        command = [str(engines_dir() / "venv" / "bin" / "python"), str(HERE / "vllm_renderings.py")]
        made = subprocess.run(
            [*command, str(engines_dir() / "model")],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=300.0,
            check=True,
        )
        assert json.loads(made.stdout[made.stdout.index("{") :]) == kept[name]
