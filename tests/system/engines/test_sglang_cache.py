"""Two real SGLang engines: requests go where the engines say that the pages are."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.engines.cache_law import CONTEXT_TOKENS, RING_BATCHES, ROOM_TOKENS, CacheLaw
from tests.system.engines.calls import stopped, two_of
from tests.system.engines.sglang_server import SglangServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, SglangServer]]:
    """Two engines with little room."""
    async with stopped(two_of(SglangServer, engine_folder)) as both:
        flags = ("--enable-metrics",)
        await asyncio.gather(
            both[1].start(n_tokens=ROOM_TOKENS, context_length=CONTEXT_TOKENS, flags=flags),
            both[2].start(
                n_tokens=ROOM_TOKENS, context_length=CONTEXT_TOKENS, buffer_steps=RING_BATCHES, flags=flags
            ),
        )
        yield both


class TestSglang(CacheLaw):
    """SGLang keeps the law."""
