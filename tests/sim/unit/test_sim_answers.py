"""Engines of a replay keep the blocks of answers, if next turns name them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.sim.replay.dispatch import ClosedLoop
from kvrouter.sim.traces import answers
from kvrouter.sim.traces.answers import with_named_answers
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import TraceRequest, Wait
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import cached_tokens_of, config, engine, tokens_of
from tests.testing.replays import PIECE_TOKENS, by_number, fleet, replayed, row
from tests.testing.trace_rows import dialogue, lines, mooncake

ONE = "workers: [{name: w}]"


def dialogue_of(
    input_tokens: int, output_tokens: int, added_tokens: int, *, shared_pieces: int | None = None
) -> list[TraceRequest]:
    """A turn and the one after its answer: their prompts share so many pieces, by default all full ones."""
    shared = input_tokens // PIECE_TOKENS if shared_pieces is None else shared_pieces
    n_first = -(-input_tokens // PIECE_TOKENS)
    first = [*range(shared), *range(1_000, 1_000 + n_first - shared)]
    tokens = input_tokens + output_tokens + added_tokens
    second = [*range(shared), *range(2_000, 2_000 + -(-tokens // PIECE_TOKENS) - shared)]
    return [
        row(0, 0.0, first, input_tokens=input_tokens, output_tokens=output_tokens),
        row(1, 500.0, second, input_tokens=tokens, waits=(Wait(0),)),
    ]


def pieces_of(rows: Iterable[TraceRequest]) -> list[list[int]]:
    return [[*each.pieces] for each in rows]


@given(
    input_tokens=st.integers(PIECE_TOKENS, 6 * PIECE_TOKENS),
    output_tokens=st.integers(1, 4 * PIECE_TOKENS),
    added_tokens=st.integers(0, 3 * PIECE_TOKENS),
    block_size=st.sampled_from((16, 64)),
)
@settings(max_examples=40, deadline=None)
def test_a_next_turn_finds_of_an_answer_what_an_engine_with_tokens_has(
    input_tokens: int, output_tokens: int, added_tokens: int, block_size: int
) -> None:
    rows = list(with_named_answers(dialogue_of(input_tokens, output_tokens, added_tokens)))
    outcomes = by_number(replayed(rows, fleet(ONE, block_size=block_size)))

    mock = engine(config(block_size=block_size, total_kv_blocks=1_024, max_num_batched_tokens=512))
    prompt = list(range(input_tokens))
    mock.submit(0.0, plain_leg("first", prompt, max_tokens=output_tokens))
    mock.advance(400.0)
    answer = tokens_of(mock.take_outputs(), "first")
    mock.submit(500.0, plain_leg("second", [*prompt, *answer, *range(added_tokens)]))
    mock.advance(900.0)
    assert len(answer) == output_tokens
    assert cached_tokens_of(mock.take_outputs(), "second") == [outcomes[1].cached_tokens]
    assert outcomes[1].predicted_tokens >= outcomes[1].cached_tokens
    assert outcomes[1].cached_tokens <= outcomes[1].ceiling_tokens
    assert outcomes[1].ceiling_tokens == (input_tokens + output_tokens) // block_size * block_size


def test_without_names_a_next_turn_finds_no_blocks_of_the_answer() -> None:
    rows = dialogue_of(128, 128, 64)
    found = [by_number(replayed(each, fleet(ONE)))[1] for each in (rows, with_named_answers(rows))]
    assert [(each.cached_tokens, each.ceiling_tokens) for each in found] == [(128, 128), (192, 256)]


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({"shared_pieces": 1}, "it begins otherwise"),
        ({"added_tokens": -64}, "it has no room for the answer"),
    ],
)
def test_a_turn_that_does_not_hold_an_answer_names_none_of_it(later: dict[str, int], why: str) -> None:
    rows = dialogue_of(**{"input_tokens": 128, "output_tokens": 128, "added_tokens": 0, **later})
    assert pieces_of(with_named_answers(rows)) == pieces_of(rows), why


def test_only_turns_that_wait_for_an_answer_name_its_blocks() -> None:
    first, second = dialogue_of(128, 128, 0)
    for waits in ((), (Wait(0, for_arrival=True),)):
        alone = row(1, 500.0, list(second.pieces), waits=waits)
        assert pieces_of(with_named_answers([first, alone])) == pieces_of([first, alone])


def test_the_first_turn_after_an_answer_names_its_blocks() -> None:
    first, second = dialogue_of(128, 64, 0)
    other = row(2, 600.0, [0, 1, 5_000, 5_001], waits=(Wait(0),))
    named, *rest = pieces_of(with_named_answers([first, second, other]))
    assert named == [0, 1, 2_000]
    assert rest == pieces_of([second, other])


def test_equal_prompts_that_end_within_a_piece_are_still_found_alike() -> None:
    prompts = [row(number, 50.0 * number, [0, 1], input_tokens=100) for number in range(2)]
    turns = [
        row(2 + number, 500.0, [0, 1_000 + number, 2_000 + number], waits=(Wait(number),))
        for number in range(2)
    ]
    outcomes = by_number(replayed(with_named_answers([*prompts, *turns]), fleet(ONE, block_size=16)))
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 96, 64, 64]
    only, turn = pieces_of(with_named_answers([prompts[0], row(1, 500.0, [0, 7, 8], waits=(Wait(0),))]))
    assert (only, turn) == ([0, 7], [0, 7, 8])


def test_a_trace_is_read_with_named_answers_only_on_demand(write_trace: Callable[[bytes], Path]) -> None:
    turns = lines(dialogue("s", 512, [1], timestamp=0), dialogue("s", 1_100, [1, 2, 3], delay=5))
    path = write_trace(turns)
    assert [each.named_tokens for each in open_trace(path)] == [0, 0]
    trace = open_trace(path, reuses_answers=True)
    assert [each.named_tokens for each in trace] == [517, 1_100]
    assert answers.NOTE in trace.info.notes
    ClosedLoop().check(trace.info)
    assert [each.named_tokens for each in open_trace(path, reuses_answers=True, rows_max=1)] == [512]


def test_answers_of_a_trace_without_sessions_cannot_be_reused(write_trace: Callable[[bytes], Path]) -> None:
    path = write_trace(json.dumps(mooncake(0, 512, [1])).encode())
    with pytest.raises(
        ConfigError, match=r"^reuse_answers: .* has no sessions, so no turn follows an answer$"
    ):
        open_trace(path, reuses_answers=True)
