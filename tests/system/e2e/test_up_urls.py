"""``kvrouter up --engine vllm --url A --url B``, as a process: the engines are asked for all else."""

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.config import MockConfig
from tests.testing.engine_requests import MODEL
from tests.testing.processes import ENDS_WITHIN_S, READY_WITHIN_S, eventually, fleet
from tests.testing.small_engine import SmallEngine, small_engine, timing
from tests.testing.small_engine_protocols import VllmProtocol

BLOCK_SIZE = 32
CONTEXT_TOKENS = 700
CONFIG = MockConfig(block_size=BLOCK_SIZE, total_kv_blocks=64, timing=timing(1.0))
PROMPT = list(range(20, 20 + 8 * BLOCK_SIZE))


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[tuple[httpx.AsyncClient, list[bytes]]]:
    """The command; yields a client of its front door, and a list that gets what it wrote once it ended."""
    written: list[bytes] = []
    async with fleet() as processes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter", "up", "--engine", "vllm", "--http-port", "0", *arguments),
            env=dict(processes.environ),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )
        assert process.stderr is not None
        try:
            port = None
            async with asyncio.timeout(READY_WITHIN_S):
                while port is None:
                    written.append(await process.stderr.readline())
                    assert written[-1], b"".join(written).decode()
                    port = re.search(rb" ready .*port=(\d+)", written[-1])
            rest = asyncio.create_task(process.stderr.read())
            base_url = f"http://127.0.0.1:{port[1].decode()}"
            async with httpx.AsyncClient(base_url=base_url, timeout=60.0) as http:
                yield http, written
            process.terminate()
            async with asyncio.timeout(ENDS_WITHIN_S):
                assert await process.wait() == 0
                written.append(await rest)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_engines_at_two_urls_are_asked_and_indexed_and_one_may_come_later() -> None:
    cluster = MockCluster()
    late = SmallEngine(VllmProtocol(CONTEXT_TOKENS), CONFIG, cluster)
    await late.start()
    await late.close_door()
    try:
        async with (
            small_engine(VllmProtocol(CONTEXT_TOKENS), CONFIG, cluster) as first,
            up("--url", first.url, "--url", late.url) as (http, written),
        ):
            (model,) = (await http.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT_TOKENS)
            assert f"the engine of --url at {late.url} is awaited" in (await http.get("/ready")).text
            await late.open_door()

            async def index_blocks() -> list[int]:
                workers = (await http.get("/v1/fleet")).json()["workers"]
                return sorted(worker["ranks"][0]["index_blocks"] for worker in workers)

            async def are_both_there() -> bool:
                return len(await index_blocks()) == 2

            await eventually(are_both_there)
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
            (await http.post("/v1/completions", json=body)).raise_for_status()

            async def is_indexed() -> bool:
                return await index_blocks() == [0, 8]

            await eventually(is_indexed)
    finally:
        await late.stop()
    assert b"Traceback" not in b"".join(written)
