"""Four real vLLM engines in two zones, one that prefills and one that decodes in each; real transfers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest_asyncio

from tests.system.engines.calls import companion, until_feeds
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer, nixl
from tests.testing.processes import Fleet, Frontend, eventually

N_REQUESTS = 50
ZONES = ("a", "b")
PREFILL = {"a": 1, "b": 2}
DECODE = {"a": 11, "b": 12}
"""Worker ids by zone."""


@dataclass
class Zones:
    """The engines by worker id, and a frontend before them."""

    engines: dict[int, VllmServer]
    frontend: Frontend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Both engines of a zone have a core of their own."""
    all_four: dict[int, VllmServer] = {}
    try:
        for zone in ZONES:
            for role, worker_id, core in (
                ("kv_producer", PREFILL[zone], 0),
                ("kv_consumer", DECODE[zone], 1),
            ):
                engine = all_four[worker_id] = VllmServer(engine_folder, f"vllm-{worker_id}", core=core)
                await engine.start(kv_transfer=nixl(role))
        yield all_four
    finally:
        for engine in all_four.values():
            await engine.stop()


async def _zones(engines: dict[int, VllmServer], kvrouter: Fleet, enforcement: str) -> Zones:
    for zone in ZONES:
        policy = (
            *("--domain", f"zone={zone}"),
            *("--kv-transfer-domain", "zone", "--kv-transfer-enforcement", enforcement),
        )
        for role, worker_id in (("prefill", PREFILL[zone]), ("decode", DECODE[zone])):
            if engines[worker_id].is_running:
                await companion(kvrouter, engines[worker_id], worker_id, "--role", role, *policy)
    frontend = await kvrouter.frontend()
    await until_feeds(
        frontend, {worker_id: "live" for worker_id, engine in engines.items() if engine.is_running}
    )
    return Zones(engines, frontend)


async def test_pairs_within_a_zone_answer_as_a_single_engine(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    zones = await _zones(engines, kvrouter, "required")
    seen: set[str] = set()
    for number in range(N_REQUESTS):
        body = _body(number)
        answer = await zones.frontend.http.post("/v1/chat/completions", json=body)
        got = answer.raise_for_status().json()
        zone = _zone_of(answer.headers["x-kvrouter-prefill-domain"])
        assert _zone_of(answer.headers["x-kvrouter-decode-domain"]) == zone
        seen.add(zone)
        direct = await engines[DECODE[zone]].ask("/v1/chat/completions", **body)
        assert got["choices"][0]["message"] == direct["choices"][0]["message"]
        assert got["choices"][0]["finish_reason"] == direct["choices"][0]["finish_reason"]
        assert got["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    assert seen == set(ZONES)
    metrics = await zones.frontend.metrics()
    assert metrics.total("kv_lost_total") == 0
    for zone in ZONES:
        assert await _transferred_tokens(engines[DECODE[zone]]) > 0


async def test_a_zone_without_a_decoder_refuses_or_crosses_by_policy(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    await engines[DECODE["a"]].kill()
    zones = await _zones(engines, kvrouter, "required")
    await zones.frontend.http.post("/v1/chat/completions", json=_body(900))
    refused = await _pinned_to(zones.frontend, PREFILL["a"])
    assert refused.status_code == 503
    assert "KV keeps to zone a" in refused.json()["error"]["message"]
    for running in kvrouter.processes:
        await running.stop()
    zones = await _zones(engines, kvrouter, "fallback")

    async def served() -> bool:
        answer = await _pinned_to(zones.frontend, PREFILL["a"])
        return answer.status_code == 200 and "zone=b" in answer.headers["x-kvrouter-decode-domain"]

    await eventually(served)


def _body(number: int) -> dict[str, object]:
    text = f"{number}: tell of transfers, and of the zones that they stay in. " * (2 + number % 4)
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 6 + number % 5,
        "ignore_eos": True,
    }


def _zone_of(domains: str) -> str:
    return domains.removeprefix("zone=")


async def _pinned_to(frontend: Frontend, worker_id: int) -> httpx.Response:
    body = {**_body(1000), "nvext": {"prefill_worker_id": worker_id}}
    return await frontend.http.post("/v1/chat/completions", json=body)


async def _transferred_tokens(engine: VllmServer) -> float:
    """How many prompt tokens the engine got from another one."""
    page = (await engine.http.get("/metrics")).raise_for_status().text
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("vllm:prompt_tokens_by_source_total") and "external_kv_transfer" in line
    )
