"""Two real vLLM engines in one zone that hand KV over through a folder, and say nothing of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.engines.calls import chat_body, companion, stopped, until_feeds
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet

PREFILL, DECODE = 1, 2
"""Worker ids."""

N_REQUESTS = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    shared = engine_folder / "shared"
    shared.mkdir()
    both = {
        PREFILL: VllmServer(engine_folder, "prefill", core=0),
        DECODE: VllmServer(engine_folder, "decode", core=1),
    }
    async with stopped(both):
        await asyncio.gather(
            *(
                both[worker_id].start(
                    kv_transfer={
                        "kv_connector": "ExampleConnector",
                        "kv_role": role,
                        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
                    }
                )
                for worker_id, role in ((PREFILL, "kv_producer"), (DECODE, "kv_consumer"))
            )
        )
        yield both


async def test_a_decode_engine_finds_the_prefill_kv_in_shared_storage(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    zone = ("--domain", "zone=a", "--kv-transfer-domain", "zone", "--kv-transfer-enforcement", "required")
    prefill = await companion(kvrouter, engines[PREFILL], PREFILL, "--role", "prefill", *zone)
    await companion(kvrouter, engines[DECODE], DECODE, "--role", "decode", *zone)
    await prefill.has_logged("has no NixlConnector")
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, {PREFILL: "live", DECODE: "live"})
    for number in range(N_REQUESTS):
        body = {**chat_body(f"{number}: what is in the folder? " * (6 + number)), "max_tokens": 8}
        answer = await frontend.http.post("/v1/chat/completions", json=body)
        got = answer.raise_for_status().json()
        assert answer.headers["x-kvrouter-prefill-domain"] == "zone=a"
        assert answer.headers["x-kvrouter-decode-domain"] == "zone=a"
        direct = await engines[PREFILL].ask("/v1/chat/completions", **body)
        assert got["choices"][0]["message"] == direct["choices"][0]["message"]
    metrics = await frontend.metrics()
    assert metrics.total("retries_total") == metrics.total("kv_lost_total") == 0
    assert await _found_tokens(engines[DECODE]) > N_REQUESTS * 32


async def _found_tokens(engine: VllmServer) -> float:
    """How many prompt tokens the engine found in the folder."""
    page = (await engine.http.get("/metrics")).raise_for_status().text
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    )
