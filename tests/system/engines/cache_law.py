"""What holds for two real engines behind kvrouter: requests go where the engines say that the blocks are.

A module of tests subclasses :class:`CacheLaw` and has a fixture ``engines``: two by worker id, with room for
:data:`ROOM_TOKENS` each; the second one can replay :data:`RING_BATCHES` batches.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest_asyncio

from kvrouter.cli.bench.counters import CacheCounts, read_counts
from kvrouter.engines.openai.server import EngineServer
from tests.system.engines.calls import (
    attached,
    cached_tokens,
    chat,
    chat_body,
    companion,
    complete,
    index_is_settled,
    lines_of,
    predicted_tokens,
    prompt_of,
    until_feeds,
    worker_of,
)
from tests.system.engines.real_engine import MODEL, RealEngine
from tests.testing.processes import Fleet, Frontend, eventually

ROOM_TOKENS = 1280
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 256
RING_BATCHES = 2
"""So few batches can be replayed that whoever comes late misses some."""


@dataclass
class Pair:
    """Two engines and a frontend before them."""

    engines: Mapping[int, RealEngine]
    frontend: Frontend

    def predicted(self, answer: httpx.Response, n_prompt_tokens: int) -> int:
        """How many cached tokens the router counted on."""
        return predicted_tokens(answer, n_prompt_tokens, self.engines[1].block_size)

    async def probe(self, seed: int) -> tuple[int, int]:
        """Cached and predicted tokens of a prompt that was asked before."""
        prompt = [*prompt_of(seed, PROMPT_TOKENS), 3, 4, 5]
        answer = await complete(self.frontend, prompt)
        return cached_tokens(answer), self.predicted(answer, len(prompt))


class CacheLaw:
    """The tests."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def pair(self, engines: Mapping[int, RealEngine], kvrouter: Fleet) -> Pair:
        """The engines with empty caches, attached."""
        for engine in engines.values():
            await engine.forget()
        return Pair(engines, await attached(kvrouter, engines))

    async def test_requests_with_shared_prefixes_go_to_the_caching_engine(self, pair: Pair) -> None:
        homes = {}
        for seed in range(4):
            first = await complete(pair.frontend, prompt_of(seed, PROMPT_TOKENS))
            assert cached_tokens(first) == pair.predicted(first, PROMPT_TOKENS) == 0
            homes[seed] = worker_of(first)
        await index_is_settled(pair.frontend)
        for seed in range(4):
            longer = prompt_of(seed, PROMPT_TOKENS) + prompt_of(seed + 100, 40)
            again = await complete(pair.frontend, longer)
            assert worker_of(again) == homes[seed]
            assert cached_tokens(again) == pair.predicted(again, len(longer)) == PROMPT_TOKENS

    async def test_the_pages_hit_rate_is_that_of_the_engines_own_counters(self, pair: Pair) -> None:
        async with AsyncExitStack() as stack:
            servers = [EngineServer(engine.url) for engine in pair.engines.values()]
            for server in servers:
                await server.open()
                stack.push_async_callback(server.close)
            before = await read_counts(servers, MODEL)
            for seed in (40, 41, 40, 41):
                await complete(pair.frontend, prompt_of(seed, PROMPT_TOKENS))
                await index_is_settled(pair.frontend)
            text = "word " * 100
            for _ in range(2):
                (await chat(pair.frontend, text)).raise_for_status()
                await index_is_settled(pair.frontend)
            async for answer, _line in lines_of(pair.frontend.http, "/v1/chat/completions", chat_body(text)):
                answer.raise_for_status()
            after = await read_counts(servers, MODEL)
        assert before is not None
        assert after is not None
        shown = (await pair.frontend.fleet())["request_stats"]["since_start"]["reported"]
        counted = after.since(before)
        assert counted == CacheCounts(shown["prompt_tokens"], shown["cached_tokens"])
        assert counted.cached_tokens > 2 * (PROMPT_TOKENS - pair.engines[1].block_size)

    async def test_evicted_and_cleared_blocks_are_not_predicted(self, pair: Pair) -> None:
        for seed in range(20, 32):  # more than both engines have room for
            await complete(pair.frontend, prompt_of(seed, PROMPT_TOKENS))
        await index_is_settled(pair.frontend)
        # The newest first: a probe of what is gone is computed again, and evicts what is oldest.
        probes = [await pair.probe(seed) for seed in reversed(range(20, 32))]
        assert [cached for cached, _ in probes] == [predicted for _, predicted in probes]
        assert any(cached for cached, _ in probes)
        assert not all(cached for cached, _ in probes)
        for engine in pair.engines.values():
            await engine.forget()
        await index_is_settled(pair.frontend)
        assert await pair.probe(31) == (0, 0)

    async def test_a_worker_attached_past_the_ring_is_partial_until_a_clear(
        self, engines: Mapping[int, RealEngine], kvrouter: Fleet
    ) -> None:
        engine = engines[2]
        await engine.forget()
        early, late = prompt_of(50, PROMPT_TOKENS), prompt_of(51, PROMPT_TOKENS)
        await engine.complete(early, max_tokens=1)
        for filler in range(RING_BATCHES + 1):
            await engine.complete(prompt_of(60 + filler, engine.block_size + 1), max_tokens=1)
        worker = await companion(kvrouter, engine, 2)
        frontend = await kvrouter.frontend()
        pair = Pair({1: engine}, frontend)
        await until_feeds(frontend, {2: "partial"})
        await worker.has_logged("cache_partial")
        unknown = await complete(frontend, early + [3] * 40)
        assert pair.predicted(unknown, len(early) + 40) == 0
        assert cached_tokens(unknown) == len(early)
        await complete(frontend, late)

        async def late_is_known() -> bool:
            again = await complete(frontend, late + [4] * 40)
            return pair.predicted(again, len(late) + 40) == cached_tokens(again) == len(late)

        await eventually(late_is_known)
        await engine.forget()
        await until_feeds(frontend, {2: "live"})
        assert await pair.probe(51) == (0, 0)
