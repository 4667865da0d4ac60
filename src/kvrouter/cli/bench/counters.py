"""Counters of prompt tokens and cached ones, from metrics pages of engines, or of a router before them."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.engines.openai.metrics import Sample, read_metrics
from kvrouter.engines.openai.server import EngineServer

COUNTERS = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
    ("kvrouter_cache_reported_prompt_tokens_total", "kvrouter_cached_tokens_total"),
)
"""Prompt tokens, and those of them that were cached, by the names of each program."""

_NAMES = tuple(name for names in COUNTERS for name in names)

SETTLE_TRIES = 20
SETTLE_PAUSE_S = 0.05
"""How often, and with what pause, pages are read until they stand still: engines count behind an answer."""


class CacheCounts(msgspec.Struct, frozen=True):
    """Prompt tokens that were counted, and those of them that were cached."""

    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def total(cls, counts: Iterable["CacheCounts"]) -> "CacheCounts":
        """Return their sum."""
        known = tuple(counts)
        return cls(sum(each.prompt_tokens for each in known), sum(each.cached_tokens for each in known))

    def since(self, before: "CacheCounts") -> "CacheCounts | None":
        """Return what came after ``before``; None where a counter began anew, as when an engine restarts."""
        prompt_tokens = self.prompt_tokens - before.prompt_tokens
        cached_tokens = self.cached_tokens - before.cached_tokens
        return CacheCounts(prompt_tokens, cached_tokens) if min(prompt_tokens, cached_tokens) >= 0 else None


async def read_counts(servers: Sequence[EngineServer], model: str) -> CacheCounts | None:
    """Return the sums over all servers, once they stand still; None where one has no such counters."""
    last: CacheCounts | None = None
    for _ in range(SETTLE_TRIES):
        found = await asyncio.gather(*(_counts_of(server, model) for server in servers))
        known = [each for each in found if each is not None]
        if len(known) < len(servers):
            return None
        now = CacheCounts.total(known)
        if now == last:
            return now
        last = now
        await asyncio.sleep(SETTLE_PAUSE_S)
    return last


async def _counts_of(server: EngineServer, model: str) -> CacheCounts | None:
    try:
        page = await server.metrics(_NAMES)
        samples = {} if page is None else read_metrics(page, _NAMES)
    except KvrouterError:
        return None
    for names in COUNTERS:
        if names[0] in samples:
            return CacheCounts(*(_sum_of(samples.get(name, ()), model) for name in names))
    return None


def _sum_of(samples: Iterable[Sample], model: str) -> int:
    """Return the sum of a counter; a router has one of each model, an engine has one model."""
    return round(sum(each.value for each in samples if each.labels.get("model", model) == model))
