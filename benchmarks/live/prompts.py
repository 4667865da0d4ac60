"""Prompts for the rows of a trace, in tokens of the mock model: alike as far as their pieces are."""

from itertools import chain

from benchmarks.http_replay.synthesis import block_word_numbers
from benchmarks.http_replay.trace import BlockId
from kvrouter.sim.traces.trace_request import TraceRequest
from kvrouter.text.model import FIRST_WORD_ID, mock_words


def prompt_tokens(row: TraceRequest) -> list[int]:
    """Return ``row.input_tokens`` token ids. A tail without a name is this row's own."""
    vocabulary = len(mock_words())
    names = [*row.pieces]
    lacking = -(-row.input_tokens // row.piece_tokens) - len(names)
    names += [-1 - row.number] * lacking
    numbers = chain.from_iterable(
        block_word_numbers(BlockId(name), vocabulary, n_words=row.piece_tokens) for name in names
    )
    return [FIRST_WORD_ID + number for number, _ in zip(numbers, range(row.input_tokens), strict=False)]
