"""A LoRA adapter of a real vLLM: served by its name, where it is, and by its own blocks."""

import subprocess
from pathlib import Path
from typing import Any

from tests.system.engines.calls import attached, stopped, two_of
from tests.system.engines.install import engines_dir
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.processes import Fleet, Frontend, eventually

ADAPTER = "french"
PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))
CACHED = 7 * BLOCK_SIZE


def write_adapter(folder: Path) -> Path:
    written = folder / ADAPTER
    writer = Path(__file__).with_name("tiny_adapter.py")
    subprocess.run([engines_dir() / "venv" / "bin" / "python", writer, written], check=True)
    return written


async def complete(frontend: Frontend, model: str) -> tuple[str, str, int, int]:
    """The text, the worker, the tokens that were counted on, and those that its engine had."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = (await frontend.http.post("/v1/completions", json=body)).raise_for_status()
    said: dict[str, Any] = answer.json()
    return (
        said["choices"][0]["text"],
        answer.headers["x-kvrouter-decode-worker"],
        int(answer.headers["x-kvrouter-overlap-blocks"]) * BLOCK_SIZE,
        (said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"],
    )


async def test_an_adapter_is_served_by_its_engine_with_its_own_blocks(
    kvrouter: Fleet, engine_folder: Path
) -> None:
    adapter = write_adapter(engine_folder)
    async with stopped(two_of(VllmServer, engine_folder)) as engines:
        await engines[1].start()
        lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}")
        await engines[2].start(flags=lora)
        frontend = await attached(kvrouter, engines)
        listed = (await frontend.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in listed] == [(ADAPTER, MODEL), (MODEL, None)]

        text, worker, counted_on, cached = await complete(frontend, ADAPTER)
        assert (worker, counted_on, cached) == ("2", 0, 0)
        direct = await engines[2].ask(
            "/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, model=ADAPTER
        )
        assert text == direct["choices"][0]["text"]

        async def is_known() -> bool:
            again = await complete(frontend, ADAPTER)
            assert again[:2] == (text, "2")
            return again[2] >= CACHED and again[3] == CACHED

        await eventually(is_known)
        other = await complete(frontend, MODEL)
        assert other[0] != text, "the adapter changes answers"
        assert other[2:] == (0, 0), "what the adapter's requests left is of no use to the model's own"
