"""Conversations over a real vLLM pair whose KV goes both ways: prefill computes the new tokens only."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.engines.calls import (
    companion,
    complete,
    prompt_of,
    stopped,
    until_feeds,
)
from tests.system.engines.real_engine import RealEngine
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.processes import Fleet, Frontend, eventually

PREFILL, DECODE = 1, 2
"""Worker ids."""

TURNS = 10
ANSWER_TOKENS = 3 * BLOCK_SIZE + 1
"""The last token of an answer has no KV: the blocks of a turn end before it."""

OUTCOMES = ("pulled", "not_kept", "failed")

NEW_TOKENS = 2 * BLOCK_SIZE - 1

SLOW_PREFILL = "prefill_linear: 2.0\n"
"""As slow a prefill as that of a CPU: for the default, a large GPU's, so few tokens are not worth a fetch."""


def _nixl(role: str) -> dict[str, object]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 0,
            "decoder_kv_blocks_ttl": 10,
        },
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    prefill = VllmServer(engine_folder, "prefill", core=0)
    decode = VllmServer(engine_folder, "decode", core=1)
    async with stopped({PREFILL: prefill, DECODE: decode}) as both:
        await asyncio.gather(
            prefill.start(kv_transfer=_nixl("kv_producer")), decode.start(kv_transfer=_nixl("kv_consumer"))
        )
        yield both


async def test_a_prefill_engine_computes_only_the_new_tokens_of_a_turn(
    engines: dict[int, VllmServer], kvrouter: Fleet, tmp_path: Path
) -> None:
    for worker_id, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        await companion(kvrouter, engines[worker_id], worker_id, "--role", role)
    timing = tmp_path / "timing.yaml"
    timing.write_text(SLOW_PREFILL)
    frontend = await kvrouter.frontend("--router-timing", str(timing))
    await until_feeds(frontend, {PREFILL: "live", DECODE: "live"})
    prompt = prompt_of(1, 4 * BLOCK_SIZE)
    before, n_new = await _computed(engines[PREFILL]), len(prompt)
    for turn in range(TURNS):
        asked = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answer = (await complete(frontend, prompt, **asked)).raise_for_status().json()
        direct = await engines[DECODE].complete(prompt, **asked, return_token_ids=True)
        assert answer["choices"][0]["text"] == direct["choices"][0]["text"]
        tokens = direct["choices"][0]["token_ids"]
        await _until_indexed(frontend, (len(prompt) + len(tokens) - 1) // BLOCK_SIZE)
        new = prompt_of(100 + turn, NEW_TOKENS)
        prompt = [*prompt, *tokens, *new]
        n_new += len(new)
    n_new -= NEW_TOKENS  # those of a turn that was not asked
    computed = await _computed(engines[PREFILL]) - before
    metrics = await frontend.metrics()
    by_outcome = {each: metrics.total("kv_pulled_tokens_total", outcome=each) for each in OUTCOMES}
    late = by_outcome["not_kept"]  # computed, since a busy machine's decode engine took over a second
    assert computed - late <= 1.1 * n_new + TURNS, (computed, n_new, by_outcome)
    assert late < by_outcome["pulled"]
    assert metrics.total("retries_total") == metrics.total("kv_lost_total") == 0
    assert by_outcome["pulled"] + late >= (TURNS - 1) * (ANSWER_TOKENS - BLOCK_SIZE)


async def _until_indexed(frontend: Frontend, blocks: int) -> None:
    """Wait until the index has so many blocks at the decode engine, which has seen one conversation."""

    async def is_so() -> bool:
        workers = (await frontend.fleet())["workers"]
        (decode,) = (worker for worker in workers if worker["worker_id"] == DECODE)
        return bool(decode["ranks"][0]["index_blocks"] >= blocks)

    await eventually(is_so)


async def _computed(engine: RealEngine) -> float:
    """The prompt tokens that an engine computed."""
    page = (await engine.http.get("/metrics")).raise_for_status().text
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("vllm:prompt_tokens_by_source_total") and "local_compute" in line
    )
