"""Two real vLLM engines: requests go where the engines say that the blocks are."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.vllm_server import BLOCK_SIZE, VllmServer
from tests.engines.words import (
    beside,
    cached_tokens,
    complete,
    predicted_tokens,
    prompt_of,
    until_feeds,
    worker_of,
)
from tests.support.processes import Fleet, Frontend, eventually

RING_BATCHES = 2
"""So few batches can be replayed that whoever comes late misses some."""

N_BLOCKS = 40

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Pair:
    """Two engines and a frontend before them."""

    engines: dict[int, VllmServer]
    kvrouter: Fleet
    frontend: Frontend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines with little room; the second one's ring is tiny."""
    both = {number: VllmServer(engine_folder, f"vllm-{number}", core=number - 1) for number in (1, 2)}
    try:
        await both[1].start(n_blocks=N_BLOCKS, context_length=1024)
        await both[2].start(n_blocks=N_BLOCKS, context_length=1024, buffer_steps=RING_BATCHES, hash_seed="7")
        yield both
    finally:
        for engine in both.values():
            await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: dict[int, VllmServer], kvrouter: Fleet) -> Pair:
    """The engines with empty caches, attached."""
    for engine in engines.values():
        await engine.reset_prefix_cache()
        await engine.complete([5, 6, 7], max_tokens=1)
    for number, engine in engines.items():
        await beside(kvrouter, engine, number)
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, dict.fromkeys(engines, "live"))
    return Pair(engines, kvrouter, frontend)


async def test_shared_prefixes_go_where_they_are_cached(pair: Pair) -> None:
    homes = {}
    for seed in range(4):
        first = await complete(pair.frontend, prompt_of(seed))
        assert cached_tokens(first) == predicted_tokens(first, 8 * BLOCK_SIZE) == 0
        homes[seed] = worker_of(first)
    await _index_is_settled(pair)
    for seed in range(4):
        longer = prompt_of(seed) + prompt_of(seed + 100, 40)
        again = await complete(pair.frontend, longer)
        assert worker_of(again) == homes[seed]
        assert cached_tokens(again) == predicted_tokens(again, len(longer)) == 8 * BLOCK_SIZE


async def test_what_was_evicted_or_cleared_is_not_counted_on(pair: Pair) -> None:
    for seed in range(20, 30):  # more blocks than both engines have
        await complete(pair.frontend, prompt_of(seed))
    await _index_is_settled(pair)
    probes = [await _probe(pair, seed) for seed in range(20, 30)]
    assert [cached for cached, _ in probes] == [predicted for _, predicted in probes]
    assert any(cached for cached, _ in probes)
    assert not all(cached for cached, _ in probes)
    for engine in pair.engines.values():
        await engine.reset_prefix_cache()
        await engine.complete([9, 9, 9], max_tokens=1)  # an engine tells of a clear with its next step
    await _index_is_settled(pair)
    assert await _probe(pair, 29) == (0, 0)


async def test_who_attaches_past_the_ring_knows_a_part_and_says_so(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    engine = engines[2]
    await engine.reset_prefix_cache()
    early, late = prompt_of(50), prompt_of(51)
    await engine.complete(early, max_tokens=1)
    for filler in range(RING_BATCHES + 1):
        await engine.complete(prompt_of(60 + filler, BLOCK_SIZE + 1), max_tokens=1)
    worker = await beside(kvrouter, engine, 2)
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, {2: "partial"})
    assert "cache_partial" in worker.lines()
    unknown = await complete(frontend, early + [3] * 40)
    assert predicted_tokens(unknown, len(early) + 40) == 0
    assert cached_tokens(unknown) == len(early)
    await complete(frontend, late)

    async def late_is_known() -> bool:
        again = await complete(frontend, late + [4] * 40)
        return predicted_tokens(again, len(late) + 40) == cached_tokens(again) == len(late)

    await eventually(late_is_known)


async def _probe(pair: Pair, seed: int) -> tuple[int, int]:
    """Cached and predicted tokens of a prompt that was asked before."""
    prompt = prompt_of(seed)
    answer = await complete(pair.frontend, [*prompt, 3, 4, 5])
    return cached_tokens(answer), predicted_tokens(answer, len(prompt) + 3)


async def _index_is_settled(pair: Pair) -> None:
    """Wait until the index does not change any more: nobody tells that the last event has come."""
    seen: list[int] = []

    async def stands_still() -> bool:
        ranks = [rank for worker in (await pair.frontend.fleet())["workers"] for rank in worker["ranks"]]
        seen.append(sum(rank["index_blocks"] for rank in ranks))
        return len(seen) > 5 and len(set(seen[-5:])) == 1

    await eventually(stands_still)
