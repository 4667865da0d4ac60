"""``kvrouter up --engine vllm --url A --url B`` before two real vLLM servers; the second comes later."""

from pathlib import Path

from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.processes import Fleet, eventually

PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 4}


async def test_two_urls_alone_make_a_fleet_that_is_indexed_and_takes_chats(
    kvrouter: Fleet, tmp_path: Path
) -> None:
    engines = [VllmServer(tmp_path, name, core=core) for core, name in enumerate(("first", "second"))]
    try:
        await engines[0].start()
        urls = [flag for engine in engines for flag in ("--url", engine.url)]
        up = await kvrouter.door("up", "--engine", "vllm", *urls)
        (model,) = (await up.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, 2048)
        assert engines[1].url in (await up.http.get("/ready")).text
        await engines[1].start()

        async def index_blocks() -> list[int]:
            return sorted(worker["ranks"][0]["index_blocks"] for worker in (await up.fleet())["workers"])

        async def are_both_there() -> bool:
            return await index_blocks() == [0, 0]

        await eventually(are_both_there)
        cached_tokens = []
        for _ in range(2):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            answer = (await up.http.post("/v1/completions", json=body)).raise_for_status().json()
            cached_tokens.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            async def is_indexed() -> bool:
                return await index_blocks() == [0, 8]

            await eventually(is_indexed)
        assert cached_tokens == [0, 7 * BLOCK_SIZE]
        (await up.http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
        (described,) = (await up.fleet())["models"]
        assert (described["tokenized_by"], described["cache_view"]) == ("router", "events")
        assert await up.stop() == 0
        assert "Traceback" not in up.lines()
    finally:
        for engine in engines:
            await engine.stop()
