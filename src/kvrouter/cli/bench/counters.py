"""The engines' own counters of cached prompt tokens, from their pages of metrics."""

import asyncio
from collections.abc import Sequence

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.server import EngineServer

COUNTERS = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
)
"""Prompt tokens, and those of them that were cached, by the names of each engine."""

SETTLE_TRIES = 20
SETTLE_PAUSE_S = 0.05
"""How often, and with what pause, pages are read until they stand still: engines count behind an answer."""


class CacheCounts(msgspec.Struct, frozen=True):
    """Prompt tokens of all engines since they began, and those of them that were cached."""

    prompt_tokens: int
    cached_tokens: int

    def since(self, before: "CacheCounts") -> "CacheCounts":
        """Return what came after ``before``."""
        return CacheCounts(
            self.prompt_tokens - before.prompt_tokens, self.cached_tokens - before.cached_tokens
        )


async def read_counts(servers: Sequence[EngineServer]) -> CacheCounts | None:
    """Return the sums over all engines, once they stand still; None where one has no such counters."""
    last: CacheCounts | None = None
    for _ in range(SETTLE_TRIES):
        found = await asyncio.gather(*map(_counts_of, servers))
        known = [each for each in found if each is not None]
        if not known or len(known) < len(servers):
            return None
        now = CacheCounts(
            sum(each.prompt_tokens for each in known), sum(each.cached_tokens for each in known)
        )
        if now == last:
            return now
        last = now
        await asyncio.sleep(SETTLE_PAUSE_S)
    return last


async def _counts_of(server: EngineServer) -> CacheCounts | None:
    try:
        page = await server.metrics([name for names in COUNTERS for name in names])
        samples = {} if page is None else read_metrics(page, [name for names in COUNTERS for name in names])
    except KvrouterError:
        return None
    for of_prompts, of_cached in COUNTERS:
        if of_prompts in samples:
            prompt_tokens = sum(sample.value for sample in samples[of_prompts])
            cached_tokens = sum(sample.value for sample in samples.get(of_cached, ()))
            return CacheCounts(round(prompt_tokens), round(cached_tokens))
    return None
