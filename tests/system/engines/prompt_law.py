"""What holds for a real engine and calls of many shapes: the router counts the tokens that the engine counts,
and predicts at a repeat the blocks that the engine finds in its cache.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvrouter.core.requests import CallRoute
from tests.system.engines.calls import index_is_settled
from tests.system.engines.install import HERE, engines_dir
from tests.system.engines.real_engine import MODEL
from tests.testing.processes import Frontend
from tests.testing.prompt_shapes import SHAPES, Shape, lengthened
from tests.testing.prompt_templates import TEMPLATES

WORDS = 120
_ISL = re.compile(r" decision .*?isl_tokens=(\d+)")


def model_with_template(folder: Path) -> Path:
    """Return the tiny model with another template, which shows all that it is given."""
    model = folder / "model"
    model.mkdir()
    for path in (engines_dir() / "model").iterdir():
        if path.name != "chat_template.jinja":
            (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(TEMPLATES["text"])
    return model


def kept_prompts(engine: str) -> Mapping[str, Mapping[str, object]]:
    """Return an engine's own renderings, by template and shape; an object where it refuses."""
    path = HERE.parents[1] / "data" / "engine-prompts" / f"{engine}.json"
    return dict(json.loads(path.read_text("utf-8"))["prompts"])


def made_again(script: str, template: str) -> object:
    """Return what an engine's own code makes of every shape, by a script that runs where it is."""
    home = engines_dir()
    shapes = [[shape.name, shape.route.value, shape.body] for shape in SHAPES]
    made = subprocess.run(
        [str(home / "venv" / "bin" / "python"), str(HERE / script), str(home / "model")],
        input=json.dumps({"template": TEMPLATES[template], "shapes": shapes}),
        env={**os.environ, "PYTHONPATH": str(home / "sglang") if script.startswith("sglang") else ""},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=True,
    )
    return json.loads(made.stdout[made.stdout.index("{") :])


async def blind_shapes(frontend: Frontend, shapes: Iterable[Shape], *, block_size: int) -> Mapping[str, str]:
    """Ask each call twice; return those of which router and engine do not say the same, and what they say."""
    asked = [lengthened(shape, WORDS) for shape in shapes]
    for shape in asked:
        await _ask(frontend, shape, block_size)
    await index_is_settled(frontend)
    seen = {shape.name: await _ask(frontend, shape, block_size) for shape in asked}
    return {name: found.as_text() for name, found in seen.items() if not found.agrees(2 * block_size)}


class _Seen:
    """What router and engine say of one answer."""

    def __init__(self, answer: dict[str, Any], overlap_blocks: int, isl_tokens: int, block_size: int) -> None:
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = usage.get("cache_read_input_tokens") or 0
        self.engine_cached = details.get("cached_tokens", cached)
        apart = cached + (usage.get("cache_creation_input_tokens") or 0)
        self.engine_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0) + apart)
        self.predicted = min(overlap_blocks, (isl_tokens - 1) // block_size) * block_size
        self.isl_tokens = isl_tokens

    def agrees(self, cached_min: int) -> bool:
        """Whether router and engine say the same, and so much was cached."""
        same = (self.isl_tokens, self.predicted) == (self.engine_tokens, self.engine_cached)
        return same and self.predicted >= cached_min

    def as_text(self) -> str:
        """What both say."""
        return f"isl {self.isl_tokens}/{self.engine_tokens}, cached {self.predicted}/{self.engine_cached}"


_LIMITS = {CallRoute.RESPONSES: "max_output_tokens"}


async def _ask(frontend: Frontend, shape: Shape, block_size: int) -> _Seen:
    body = {"model": MODEL, _LIMITS.get(shape.route, "max_tokens"): 2, "temperature": 0, **shape.body}
    logged = frontend.log.stat().st_size
    answer = await frontend.http.post(shape.route.value, json=body)
    assert answer.status_code == 200, f"{shape.name}: {answer.text}"
    decided = _ISL.search(frontend.log.read_text(errors="replace")[logged:])
    assert decided is not None
    overlap = int(answer.headers["x-kvrouter-overlap-blocks"])
    return _Seen(answer.json(), overlap, int(decided[1]), block_size)
