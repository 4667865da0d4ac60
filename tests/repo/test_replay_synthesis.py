"""Equal hash ids become equal tokens, and nothing else does; the ceiling counts what a cache could hold."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http_replay.ceiling import InfiniteCache, prompt_ceiling, trace_ceiling
from benchmarks.http_replay.schedule import first_rows, plan
from benchmarks.http_replay.synthesis import (
    BLOCK_WORDS,
    block_word_numbers,
    prompt_text,
    prompt_word_numbers,
    scaled_tokens,
)
from benchmarks.http_replay.trace import TRACE_BLOCK_TOKENS, BlockId, SampleRow, TraceRow, read_sample
from kvrouter.text.model import FIRST_WORD_ID, mock_words
from scripts.select_trace_sample import SAMPLE

VOCABULARY = 1000


def row(block_ids: list[int], *, tail_tokens: int = 0) -> TraceRow:
    full_blocks = len(block_ids) - (tail_tokens > 0)
    input_tokens = full_blocks * TRACE_BLOCK_TOKENS + tail_tokens
    return TraceRow(0, input_tokens, 10, tuple(map(BlockId, block_ids)))


chains = st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True)


@given(shared=chains, left=chains, right=chains)
def test_rows_share_exactly_the_tokens_of_their_shared_blocks(
    shared: list[int], left: list[int], right: list[int]
) -> None:
    ours = prompt_word_numbers(row(shared + left), VOCABULARY)
    theirs = prompt_word_numbers(row(shared + right), VOCABULARY)
    blocks = next(
        (at for at, (a, b) in enumerate(zip(shared + left, shared + right, strict=False)) if a != b),
        min(len(shared + left), len(shared + right)),
    )
    assert ours[: blocks * BLOCK_WORDS] == theirs[: blocks * BLOCK_WORDS]
    next_block = slice(blocks * BLOCK_WORDS, (blocks + 1) * BLOCK_WORDS)
    if ours[next_block] and theirs[next_block]:
        assert ours[next_block] != theirs[next_block]


def test_the_words_of_a_block_never_change() -> None:
    assert block_word_numbers(BlockId(972), 2**16)[:4] == (23231, 43239, 39180, 40764)


@pytest.mark.parametrize(
    ("trace_tokens", "expected"), [(1, 1), (15, 1), (16, 1), (32, 2), (511, 31), (512, 32), (1024, 64)]
)
def test_lengths_are_scaled_and_never_zero(trace_tokens: int, expected: int) -> None:
    assert scaled_tokens(trace_tokens) == expected


def test_a_partial_block_gives_the_first_of_its_words() -> None:
    words = prompt_word_numbers(row([0, 5], tail_tokens=80), VOCABULARY)
    assert words == [
        *block_word_numbers(BlockId(0), VOCABULARY),
        *block_word_numbers(BlockId(5), VOCABULARY)[:5],
    ]


def test_a_prompt_has_one_token_per_word_for_the_mock_model() -> None:
    from kvrouter.text.source import MOCK_FOLDER
    from kvrouter.text.tokenizer import Tokenizer

    words = mock_words()
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    for each in read_sample(SAMPLE)[:5]:
        numbers = prompt_word_numbers(each, len(words))
        expected = [FIRST_WORD_ID + number for number in numbers]
        assert list(tokenizer.encode(prompt_text(each, words))) == expected


def test_an_infinite_cache_counts_leading_full_blocks() -> None:
    cache = InfiniteCache(block_size=2)
    assert cache.store("aabbc") == 0
    assert cache.store("aabbcc") == 4
    assert cache.store("aaddcc") == 2
    assert cache.store("bbcc") == 0
    assert cache.store("a") == 0
    assert cache.blocks == 3 + 2 + 2


def test_a_block_is_cached_only_after_its_preceding_blocks() -> None:
    cache = InfiniteCache(block_size=1)
    cache.store("xy")
    cache.store("z")
    assert cache.store("zy") == 1
    assert cache.store("xy") == 2


def test_a_traces_ceiling_is_its_share_of_cached_tokens() -> None:
    rows = [row([0, 1, 2], tail_tokens=100), row([0, 1, 3, 4])]
    assert trace_ceiling(rows) == 2 * 512 / (2 * 512 + 100 + 4 * 512)


def test_scaling_keeps_the_ceiling_where_blocks_align() -> None:
    rows = [row([0, 1, 2]), row([0, 1, 2, 3]), row([0, 9])]
    prompts = [prompt_word_numbers(each, VOCABULARY) for each in rows]
    for block_size in (1, 16, BLOCK_WORDS):
        assert prompt_ceiling(prompts, block_size=block_size) == trace_ceiling(rows)


def test_the_plan_keeps_turns_in_order_and_compresses_time() -> None:
    rows = read_sample(SAMPLE)
    conversations = plan(rows, compression=100, words=mock_words())
    assert sum(map(len, conversations)) == len(rows)
    for turns in conversations:
        assert [request.turn for request in turns] == list(range(len(turns)))
        assert all(later.due_s > earlier.due_s for earlier, later in pairwise(turns))
    assert min(turns[0].due_s for turns in conversations) == 0
    last_s = max(turns[-1].due_s for turns in conversations)
    assert last_s == pytest.approx((rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000 / 100)


def sample_row(conversation: int, turn: int) -> SampleRow:
    return SampleRow(0, 1, 1, (BlockId(0),), conversation=conversation, turn=turn)


def test_the_first_rows_are_whole_conversations() -> None:
    rows = [sample_row(0, 0), sample_row(1, 0), sample_row(0, 1), sample_row(2, 0), sample_row(1, 1)]
    assert first_rows(rows, 5) == rows
    assert first_rows(rows, 4) == [rows[0], rows[1], rows[2], rows[4]]
    assert first_rows(rows, 2) == [rows[0], rows[2]]
    assert first_rows(rows, 1) == []
