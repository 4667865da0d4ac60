"""Two real vLLM engines: requests go where the engines say that the blocks are."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.engines.cache_law import CONTEXT_TOKENS, RING_BATCHES, ROOM_TOKENS, CacheLaw
from tests.system.engines.calls import stopped, two_of
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.testing.example_programs import check_two_servers

N_BLOCKS = ROOM_TOKENS // BLOCK_SIZE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines that call blocks by other names."""
    async with stopped(two_of(VllmServer, engine_folder)) as both:
        await asyncio.gather(
            both[1].start(n_blocks=N_BLOCKS, context_length=CONTEXT_TOKENS),
            both[2].start(
                n_blocks=N_BLOCKS, context_length=CONTEXT_TOKENS, buffer_steps=RING_BATCHES, hash_seed="7"
            ),
        )
        yield both


class TestVllm(CacheLaw):
    """vLLM keeps the law."""


async def test_the_librarys_example_routes_over_both_engines(engines: dict[int, VllmServer]) -> None:
    for engine in engines.values():
        await engine.forget()
    urls = [engine.url for engine in engines.values()]
    await check_two_servers(urls, model=MODEL, block_size=BLOCK_SIZE)
