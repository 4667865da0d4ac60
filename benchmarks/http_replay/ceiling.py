"""The most that any cache could reuse of a list of prompts: a cache that forgets nothing, asked in order."""

from collections.abc import Hashable, Iterable, Sequence

from benchmarks.http_replay.trace import TRACE_BLOCK_TOKENS, TraceRow


class InfiniteCache:
    """Remembers every full block under all blocks before it, and never evicts."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[tuple[int, tuple[Hashable, ...]], int] = {}

    def store(self, tokens: Sequence[Hashable]) -> int:
        """Remember a prompt; returns how many of its leading tokens were there before, in full blocks.

        A block is known only under a known block, so those that are known are the leading ones.
        """
        before = -1
        cached_blocks = 0
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            block = (before, tuple(tokens[start : start + self._block_size]))
            known = self._blocks.get(block)
            cached_blocks += known is not None
            before = len(self._blocks) if known is None else known
            self._blocks[block] = before
        return cached_blocks * self._block_size

    @property
    def blocks(self) -> int:
        """Different blocks seen so far."""
        return len(self._blocks)


def trace_ceiling(rows: Iterable[TraceRow]) -> float:
    """The share of all prompt tokens that an infinite cache holds, in the trace's own blocks."""
    cache = InfiniteCache(block_size=1)
    cached_tokens = prompt_tokens = 0
    for row in rows:
        cached_tokens += cache.store(row.full_block_ids) * TRACE_BLOCK_TOKENS
        prompt_tokens += row.input_tokens
    return cached_tokens / prompt_tokens


def prompt_ceiling(prompts: Iterable[Sequence[Hashable]], *, block_size: int) -> float:
    """The same share for prompts as a fleet gets them, in the fleet's blocks."""
    cache = InfiniteCache(block_size=block_size)
    cached_tokens = prompt_tokens = 0
    for prompt in prompts:
        cached_tokens += cache.store(prompt)
        prompt_tokens += len(prompt)
    return cached_tokens / prompt_tokens
