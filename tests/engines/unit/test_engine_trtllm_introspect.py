"""What TensorRT-LLM's server tells of itself, and of its load."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.engines.openai.engine import Probe
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.trtllm.attach import IDLE_AFTER_PROBES, TrtllmClient
from kvrouter.engines.trtllm.introspect import TrtllmInfo, ask_info
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.trtllm_server import ScriptedTrtllm, scripted_trtllm

RANK = WorkerRank(WorkerId(7), DpRank(0))
FACTS = TrtllmInfo(version="1.3.0", model="tiny", context_length=4096, block_size=32, total_blocks=200)
BUSY = LoadReport(rank=RANK, active_blocks=3, total_blocks=200, running_requests=2, waiting_requests=4)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedTrtllm]:
    async with scripted_trtllm() as engine:
        yield engine


@pytest_asyncio.fixture
async def server(engine: ScriptedTrtllm) -> AsyncIterator[EngineServer]:
    server = EngineServer(engine.url)
    await server.open()
    yield server
    await server.close()


def ways(info: TrtllmInfo = FACTS, block_size: int = 32) -> TrtllmClient:
    return TrtllmClient(WorkerId(7), info, block_size=block_size)


async def test_engine_that_ran_something_gives_all_info(server: EngineServer) -> None:
    assert await ask_info(server) == FACTS


async def test_engine_that_ran_nothing_is_made_to_generate_a_token(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.set_json("/metrics", [])
    assert await ask_info(server) == replace(FACTS, block_size=None, total_blocks=None)
    assert (engine.asked["/health_generate"], engine.asked["/metrics"]) == (1, 2)
    engine.set_page("/health_generate", "it failed", status=500)
    assert await ask_info(server) == replace(FACTS, block_size=None, total_blocks=None)
    engine.set_json("/metrics", [{"iter": 1}, {"iter": 2, "kvCacheStats": None}])
    assert (await ask_info(server)).block_size is None


async def test_engine_that_gives_its_block_size_is_not_made_to_generate(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.set_json("/metrics", [])
    engine.set_json("/server_info", {"disaggregated_params": None, "tokens_per_block": 64})
    assert await ask_info(server) == replace(FACTS, block_size=64, total_blocks=None)
    assert engine.asked["/health_generate"] == 0
    engine.set_json("/server_info", {"disaggregated_params": None})
    await ask_info(server)
    assert engine.asked["/health_generate"] == 1


@pytest.mark.parametrize("labels", ["", 'max_model_len=""', 'max_model_len="None"'])
async def test_missing_context_length_is_unknown(
    engine: ScriptedTrtllm, server: EngineServer, labels: str
) -> None:
    engine.set_page("/prometheus/metrics", f"trtllm_model_config_info{{{labels}}} 1.0\n")
    assert (await ask_info(server)).context_length is None
    del engine.pages["/prometheus/metrics"]
    assert (await ask_info(server)).context_length is None


@pytest.mark.parametrize(
    ("version", "is_from"),
    [("1.1.0rc5", False), ("1.2.0", True), ("1.3.0rc14", True), ("1.10", True), ("2.0", True), ("dev", True)],
)
def test_versions_are_compared_by_their_numbers(version: str, is_from: bool) -> None:
    assert replace(FACTS, version=version).is_from((1, 2)) is is_from


async def test_server_without_a_models_page_is_refused(engine: ScriptedTrtllm, server: EngineServer) -> None:
    del engine.pages["/v1/models"]
    with pytest.raises(ConfigError, match=r"^http://.* has no /v1/models: is it TensorRT-LLM's server\?"):
        await ask_info(server)


async def test_server_of_another_engine_is_refused_by_its_model_owner(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.replace("/v1/models", "tensorrt_llm", "vllm")
    with pytest.raises(ConfigError, match="owned by 'vllm', not 'tensorrt_llm'"):
        await ask_info(server)


UNKNOWN: Mapping[str, tuple[Callable[[ScriptedTrtllm], object], Mapping[str, Any]]] = {
    "no version": (lambda e: e.set_json("/version", {}), {"version": ""}),
    "an odd version": (lambda e: e.set_page("/version", b"\xff"), {"version": ""}),
    "nothing of a version": (lambda e: e.pages.pop("/version"), {"version": ""}),
    "an odd size": (lambda e: e.set_json("/server_info", {"tokens_per_block": "x"}), {}),
    "an odd load": (
        lambda e: e.set_page("/metrics", "# HELP a metric\n"),
        {"block_size": None, "total_blocks": None},
    ),
    "no size of blocks": (
        lambda e: e.replace("/metrics", '"tokensPerBlock":32', '"tokensPerBlock":0'),
        {"block_size": None, "total_blocks": None},
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unreadable_info_is_unknown(engine: ScriptedTrtllm, server: EngineServer, what: str) -> None:
    spoil, unknown = UNKNOWN[what]
    spoil(engine)
    info = await ask_info(server)
    assert replace(info, missing=()) == replace(FACTS, **unknown)


async def test_load_is_that_of_the_last_iteration(server: EngineServer) -> None:
    assert await ways().look(server) == Probe((BUSY,))


def took(kv_bytes: int, start_s: float, end_s: float) -> dict[str, object]:
    timing = {"kv_cache_size": kv_bytes, "kv_cache_transfer_start": start_s, "kv_cache_transfer_end": end_s}
    return {"request_id": 1, "ctx_request_id": 2, "perf_metrics": {"first_iter": 1, "timing_metrics": timing}}


async def test_decode_engine_reports_its_kv_transfers(engine: ScriptedTrtllm, server: EngineServer) -> None:
    looking = TrtllmClient(WorkerId(7), FACTS, block_size=32, fetches_kv=True)
    assert (await looking.look(server)).loads == (BUSY,)
    engine.set_json("/perf_metrics", [took(100, 5.0, 5.5), {"perf_metrics": {"timing_metrics": {}}}])
    (report,) = (await looking.look(server)).loads
    assert report.kv_transfers == KvTransfers(transfers=1, bytes=100, seconds=0.5)
    engine.set_json("/perf_metrics", [took(50, 7.0, 6.0), took(50, 8.0, 8.25)])
    (report,) = (await looking.look(server)).loads
    assert report.kv_transfers == KvTransfers(transfers=3, bytes=200, seconds=0.75)
    engine.set_json("/perf_metrics", [])
    engine.set_json("/metrics", [])
    idle = [await looking.look(server) for _ in range(IDLE_AFTER_PROBES)][-1]
    assert [load.kv_transfers for load in idle.loads] == [report.kv_transfers]
    engine.set_json("/perf_metrics", [took(-1, 0.0, 0.0)])
    assert await looking.look(server) == Probe(())


async def test_other_engines_are_not_asked_for_kv_transfers(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    await ways().look(server)
    assert engine.asked["/perf_metrics"] == 0


async def test_engine_without_cache_metrics_still_gives_the_other_info(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.set_page("/metrics", "", status=500)
    assert await ask_info(server) == replace(FACTS, block_size=None, total_blocks=None)


async def test_engine_idle_for_some_probes_reports_no_active_blocks(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    looking = ways()
    engine_page = engine.pages["/metrics"]
    engine.set_json("/metrics", [])
    assert [await looking.look(server) for _ in range(3)] == [Probe(())] * 3
    engine.pages["/metrics"] = engine_page
    assert await looking.look(server) == Probe((BUSY,))
    engine.set_json("/metrics", [])
    for _ in range(1, IDLE_AFTER_PROBES):
        assert await looking.look(server) == Probe(())
    assert await looking.look(server) == Probe((LoadReport(rank=RANK, active_blocks=0, total_blocks=200),))


async def test_engine_that_cannot_give_its_load_counts_as_answering(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.set_page("/metrics", "", status=500)
    assert await ways().look(server) == Probe(())


async def test_an_old_engine_is_not_asked_for_its_load(engine: ScriptedTrtllm, server: EngineServer) -> None:
    assert await ways(replace(FACTS, version="1.1.0")).look(server) == Probe(())
    assert engine.asked["/metrics"] == 0


async def test_engine_with_a_failing_health_page_is_unreachable(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    engine.set_page("/health", "LLM is unavailable.", status=503)
    with pytest.raises(WorkerUnreachable):
        await ways().look(server)


async def test_models_are_checked_again_after_a_failed_probe(
    engine: ScriptedTrtllm, server: EngineServer
) -> None:
    looking = ways()
    await looking.look(server)
    assert engine.asked["/v1/models"] == 0
    engine.set_page("/health", "", status=503)
    with pytest.raises(WorkerUnreachable):
        await looking.look(server)
    engine.set_page("/health", "")
    engine.replace("/v1/models", '"tiny"', '"big"')
    with pytest.raises(WorkerUnreachable, match="with other models: big, not tiny"):
        await looking.look(server)
    engine.replace("/v1/models", '"big"', '"tiny"')
    assert (await looking.look(server)).loads == (BUSY,)


async def test_wrong_configured_block_size_fails_the_probe(server: EngineServer) -> None:
    with pytest.raises(WorkerUnreachable, match="with other block size: 32, not 64"):
        await ways(replace(FACTS, block_size=None), block_size=64).look(server)
