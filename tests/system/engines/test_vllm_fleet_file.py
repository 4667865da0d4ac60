"""``kvrouter up`` before a real vLLM server that is a line of its fleet file, and comes up after it."""

import asyncio
import re
import sys
from pathlib import Path

import httpx

from tests.system.engines.install import engines_dir
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.processes import ENDS_WITHIN_S, READY_WITHIN_S, Fleet, eventually

PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))


async def test_a_fleet_file_engine_is_awaited_joins_and_is_indexed(kvrouter: Fleet, tmp_path: Path) -> None:
    engine = VllmServer(tmp_path, "vllm", core=0)
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"version: 1\nmodels: [{{name: {MODEL}, tokenizer: {engines_dir() / 'model'}}}]\n"
        f"workers: [{{name: a, engine: {{kind: vllm, url: '{engine.url}'}}}}]\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(file), "--http-port", "0"),
        env=kvrouter.environ,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = None
        async with asyncio.timeout(READY_WITHIN_S):
            while port is None:
                port = re.search(r" ready .*port=(\d+)", (await process.stderr.readline()).decode())
        reading = asyncio.create_task(process.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port[1]}", timeout=60.0) as http:
            awaited = f"the engine of workers[0].engine.url at {engine.url} is awaited: "
            assert awaited in (await http.get("/ready")).text
            await engine.start()

            async def is_ready() -> bool:
                return (await http.get("/ready")).status_code == 200

            async def is_known() -> bool:
                (worker,) = (await http.get("/v1/fleet")).json()["workers"]
                return bool(worker["ranks"][0]["index_blocks"] == 8)

            await eventually(is_ready)
            cached_tokens = []
            for _ in range(2):
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                cached_tokens.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                await eventually(is_known)
            assert cached_tokens == [0, 7 * BLOCK_SIZE]
        process.terminate()
        async with asyncio.timeout(ENDS_WITHIN_S):
            assert await process.wait() == 0
            assert b"Traceback" not in await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.stop()
