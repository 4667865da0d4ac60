"""The conversations of ``kvrouter bench``: what their prompts share, and how many there are."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.cli.bench.workload import (
    CONVERSATIONS_MAX,
    CONVERSATIONS_MIN,
    SALT_WORDS,
    SHORTEST_PROMPT_TOKENS,
    TURNS,
    USERS,
    Caches,
    Prompts,
    Turn,
    WorkloadSize,
    longest_prompt,
    size_workload,
    turns_in_order,
)
from kvrouter.core.errors import ConfigError

SIZE = WorkloadSize(7, 440)
CACHES = Caches(number=2, cache_tokens=19_200, context_tokens=4_096, block_size=32)


def prompts(*, salt: tuple[int, ...] = (1, 0, 1), number: int = 1, tokens_per_word: float = 1.0) -> Prompts:
    return Prompts(tokens_per_word, SIZE, number, salt)


def shared(one: str, other: str) -> int:
    """With how many equal words two prompts begin."""
    pairs = zip(one.split(), other.split(), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.split()), len(other.split())))


@given(conversation=st.integers(0, 6), per_word=st.sampled_from([0.7, 1.0, 1.9]))
def test_each_turn_begins_with_the_whole_prompt_of_the_one_before(conversation: int, per_word: float) -> None:
    of = prompts(tokens_per_word=per_word)
    texts = [of.text(Turn(conversation, turn)) for turn in range(TURNS)]
    for before, after in pairwise(texts):
        assert after.startswith(before)
        assert len(after) > len(before)
    assert len(texts[-1].split()) * per_word == pytest.approx(SIZE.prompt_tokens, rel=0.02)


def test_users_of_a_group_share_its_system_prompt_and_nobody_else_does() -> None:
    of = prompts()
    first = of.text(Turn(0, TURNS - 1))
    within = {shared(first, of.text(Turn(other, 0))) for other in range(1, USERS)}
    assert within == {SIZE.prompt_tokens * 8 // 40}
    assert shared(first, of.text(Turn(USERS, 0))) <= SALT_WORDS


def test_arms_and_rounds_and_runs_share_no_block() -> None:
    turn = Turn(0, TURNS - 1)
    texts = [prompts(salt=salt).text(turn) for salt in ((1, 0, 1), (1, 1, 1), (1, 0, 2), (2, 0, 1))]
    for at, one in enumerate(texts):
        for other in texts[at + 1 :]:
            assert shared(one, other) < SALT_WORDS
            assert one.split()[SALT_WORDS:] == other.split()[SALT_WORDS:], "but for the salt all get the same"


@given(number=st.integers(1, 100), conversations=st.integers(1, 50))
def test_every_turn_is_sent_once_behind_the_one_before(number: int, conversations: int) -> None:
    turns = turns_in_order(WorkloadSize(conversations, 440), number)
    assert sorted(turns) == [Turn(each, turn) for each in range(conversations) for turn in range(TURNS)]
    assert [turn.turn for turn in turns] == sorted(turn.turn for turn in turns)


def test_round_robin_does_not_meet_the_same_engine_at_every_turn() -> None:
    turns = turns_in_order(WorkloadSize(12, 440), 1)
    engine = {turn: at % 2 for at, turn in enumerate(turns)}
    followed = [engine[turn] == engine[turn._replace(turn=turn.turn - 1)] for turn in turns if turn.turn]
    assert 0.25 < sum(followed) / len(followed) < 0.75


@given(
    caches=st.integers(1, 64),
    cache_tokens=st.none() | st.integers(600, 2_000_000),
    context_tokens=st.none() | st.integers(256, 200_000),
    request_s=st.floats(0.0001, 100.0),
    arms=st.integers(2, 5),
    seconds=st.floats(5.0, 1_000.0),
)
def test_sizes_are_bounded_and_fit(
    caches: int,
    cache_tokens: int | None,
    context_tokens: int | None,
    request_s: float,
    arms: int,
    seconds: float,
) -> None:
    fleet = Caches(caches, cache_tokens, context_tokens, 16)
    longest = longest_prompt(fleet, None)
    try:
        size = size_workload(fleet, longest, request_s=request_s, arms=arms, seconds=seconds, is_fixed=False)
    except ConfigError:
        assert CONVERSATIONS_MIN * arms * TURNS * request_s > seconds
        return
    assert CONVERSATIONS_MIN <= size.conversations <= CONVERSATIONS_MAX
    assert size.prompt_tokens <= longest
    assert size.prompt_tokens >= min(longest, SHORTEST_PROMPT_TOKENS)
    if context_tokens is not None:
        assert size.prompt_tokens + 16 <= context_tokens
    if cache_tokens is not None:
        # a group that is not full has its system prompt alone
        assert size.distinct_tokens <= caches * cache_tokens
    assert 0.0 < size.possible_hit_rate(1) < 1.0
    assert size.possible_hit_rate(1) == pytest.approx(
        1 - size.distinct_tokens / size.total_prompt_tokens, abs=0.02
    )
    assert size.distinct_tokens < size.total_prompt_tokens


def test_conversations_fill_more_than_one_cache_where_time_allows_it() -> None:
    size = size_workload(CACHES, 3264, request_s=0.01, arms=2, seconds=100.0, is_fixed=False)
    assert 1.5 * 19_200 < size.distinct_tokens < 2 * 19_200


def test_slow_engines_get_shorter_prompts_unless_their_length_is_given() -> None:
    slow = size_workload(CACHES, 3264, request_s=10.0, arms=2, seconds=60.0, is_fixed=False)
    assert slow == (CONVERSATIONS_MIN, SHORTEST_PROMPT_TOKENS)
    fixed = size_workload(CACHES, 3264, request_s=1.5, arms=2, seconds=60.0, is_fixed=True)
    assert fixed == (CONVERSATIONS_MIN, 3264)


def test_a_time_that_the_smallest_round_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--seconds: must be at least 320: .* 8 conversations"):
        size_workload(CACHES, 3264, request_s=10.0, arms=2, seconds=60.0, is_fixed=True)
    with pytest.raises(ConfigError, match=r"--seconds: must be at least 76: .* up to 256 tokens"):
        size_workload(CACHES, 3264, request_s=30.0, arms=2, seconds=60.0, is_fixed=False)


def test_only_whole_blocks_can_be_found() -> None:
    size = WorkloadSize(6, 400)
    shared, repeated = 80, 340 + 360 + 380
    assert size.possible_hit_rate(1) == pytest.approx((4 * shared + 6 * repeated) / size.total_prompt_tokens)
    assert size.possible_hit_rate(64) == pytest.approx((4 * 64 + 6 * 3 * 320) / size.total_prompt_tokens)
    assert size.possible_hit_rate(512) == 0.0


def test_prompts_that_cannot_be_are_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens: must be at most 3264, not 4000: "):
        longest_prompt(CACHES, 4_000)
    with pytest.raises(ConfigError, match="--prompt-tokens: must be at most 8, not 20: "):
        longest_prompt(CACHES._replace(context_tokens=26), None)
