"""``kvrouter up --engine vllm --url A --url B``, as a process: the engines are asked for all else."""

from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.config import MockConfig
from tests.testing.engine_requests import MODEL
from tests.testing.processes import eventually, fleet
from tests.testing.small_engine import SmallEngine, small_engine, timing
from tests.testing.small_engine_protocols import VllmProtocol

BLOCK_SIZE = 32
CONTEXT_TOKENS = 700
CONFIG = MockConfig(block_size=BLOCK_SIZE, total_kv_blocks=64, timing=timing(1.0))
PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))


async def test_engines_at_two_urls_are_asked_and_indexed_and_one_may_come_later() -> None:
    cluster = MockCluster()
    late = SmallEngine(VllmProtocol(CONTEXT_TOKENS), CONFIG, cluster)
    await late.start()
    await late.close_door()
    try:
        async with small_engine(VllmProtocol(CONTEXT_TOKENS), CONFIG, cluster) as first, fleet() as processes:
            up = await processes.door("up", "--engine", "vllm", "--url", first.url, "--url", late.url)
            (model,) = (await up.http.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT_TOKENS)
            assert f"the engine of --url at {late.url} is awaited" in (await up.http.get("/ready")).text
            await late.open_door()

            async def index_blocks() -> list[int]:
                return sorted(worker["ranks"][0]["index_blocks"] for worker in (await up.fleet())["workers"])

            async def are_both_there() -> bool:
                return len(await index_blocks()) == 2

            await eventually(are_both_there)
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
            (await up.http.post("/v1/completions", json=body)).raise_for_status()

            async def is_indexed() -> bool:
                return await index_blocks() == [0, 8]

            await eventually(is_indexed)
            assert await up.stop() == 0
            assert "Traceback" not in up.lines()
    finally:
        await late.stop()
