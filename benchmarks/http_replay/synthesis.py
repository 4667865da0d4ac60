"""Text for the rows of a trace: equal hash ids become equal words, and every word is one token.

One token of the replay stands for ``TRACE_BLOCK_TOKENS / BLOCK_WORDS`` tokens of the trace, in prompts and
in answers.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from benchmarks.http_replay.trace import TRACE_BLOCK_TOKENS, BlockId, TraceRow

BLOCK_WORDS = 32
"""Words that stand for one block of the trace."""

SHARED_BLOCKS_KEPT = 4096
"""Blocks whose word numbers are kept for the next row; more than the sample holds."""


@lru_cache(maxsize=SHARED_BLOCKS_KEPT)
def block_word_numbers(block_id: BlockId, vocabulary: int, *, n_words: int = BLOCK_WORDS) -> tuple[int, ...]:
    """Which words of a vocabulary of that size stand for the block; the same on every machine."""
    drawn = hashlib.shake_128(str(block_id).encode()).digest(4 * n_words)
    return tuple(
        int.from_bytes(drawn[4 * word : 4 * word + 4], "little") % vocabulary for word in range(n_words)
    )


def scaled_tokens(trace_tokens: int) -> int:
    """Tokens of the replay that stand for so many of the trace, at least one."""
    return max(1, trace_tokens * BLOCK_WORDS // TRACE_BLOCK_TOKENS)


def prompt_word_numbers(row: TraceRow, vocabulary: int) -> list[int]:
    """The words of a row's prompt; a partial last block gives the first part of its words."""
    full_blocks, tail_tokens = divmod(row.input_tokens, TRACE_BLOCK_TOKENS)
    words = list(chain.from_iterable(block_word_numbers(block, vocabulary) for block in row.full_block_ids))
    if tail_tokens:
        words.extend(block_word_numbers(row.block_ids[full_blocks], vocabulary)[: scaled_tokens(tail_tokens)])
    return words


def prompt_text(row: TraceRow, words: Sequence[str]) -> str:
    """The prompt, each word after one space: n words are n tokens of the mock model."""
    return "".join(f" {words[number]}" for number in prompt_word_numbers(row, len(words)))
