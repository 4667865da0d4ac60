"""The ranks of mock engines in the native core: their schedulers, and their results as numbers.

The native core numbers ranks and sequences; a sequence's upper 32 bits are its rank's number.
"""

from typing import TypeAlias

from msgspec.structs import astuple

from kvrouter import _native
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import FinishReason
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.tokens import MASK

LoadRow: TypeAlias = tuple[int, int, int, int]
"""Active blocks, tokens to prefill, running and waiting requests."""

ChunkRow: TypeAlias = tuple[int, int, int | None, int]
"""A sequence, its new tokens, its cached tokens where they are new, and how it ended (see FINISHES)."""

EndedRow: TypeAlias = tuple[int, float, float, int, int]
"""A sequence, the seconds of its first and its last token, its output tokens and its cached tokens."""

WantingRow: TypeAlias = tuple[int, int]
"""A sequence that has memory for the KV that it waits for, and the tokens of it that it lacks."""

PagedKv = _native.PagedKv
"""The KV memory of one rank, on its own."""

FINISHES = (None, FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED)
"""How a sequence ended, by the native core's numbers; None while it runs."""


class EngineRanks(_native.EngineRanks):
    """Ranks of one or many engines on one clock, the earliest step first."""

    def add_rank(self, config: MockConfig, dp_rank: DpRank, *, leaps: bool) -> int:
        """Add a rank of an engine; return its number."""
        return self.add(
            block_size=config.block_size,
            total_blocks=config.total_kv_blocks,
            seqs_max=config.max_num_seqs,
            tokens_max=config.max_num_batched_tokens,
            chunked_prefill=config.chunked_prefill,
            plans_ahead=config.async_scheduling,
            prefix_caching=config.prefix_caching,
            opaque=config.engine_hashing is EngineHashing.OPAQUE,
            seed=((config.seed << 16) + dp_rank) & MASK,
            timing=astuple(config.timing),
            leaps=leaps,
        )


def rank_of(sequence: int) -> int:
    """Return the number of the rank that a sequence is at."""
    return sequence >> 32
