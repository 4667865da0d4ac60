"""Outcomes come back as they were added, take little memory, and their columns say what each of them says."""

import tracemalloc
from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import WorkerId
from kvrouter.sim.replay.outcome import Move, Outcome
from kvrouter.sim.replay.outcomes import Outcomes

HELD_BYTES_MOST = 200
"""What an outcome may take."""

MOMENTS = st.none() | st.floats(0.0, 1e9)
TOKENS = st.integers(0, 2**31)
WORKERS = st.none() | st.integers(0, 2**40).map(WorkerId)
PLACES = st.dictionaries(st.sampled_from(["zone", "rack"]), st.sampled_from("ab"))
MOVES = st.builds(Move, PLACES, PLACES, st.integers(0, 2**50))
EACH = st.builds(
    Outcome,
    number=st.integers(0, 2**40),
    arrived_s=st.floats(0.0, 1e9),
    input_tokens=TOKENS,
    output_tokens=TOKENS,
    ceiling_tokens=TOKENS,
    placed_s=MOMENTS,
    first_s=MOMENTS,
    last_s=MOMENTS,
    generated_tokens=TOKENS,
    cached_tokens=TOKENS,
    predicted_tokens=TOKENS,
    prefill=WORKERS,
    decode=WORKERS,
    crosses=st.booleans(),
    attempts=st.integers(0, 100),
    error=st.sampled_from(["", "no_eligible_worker", "deadline_exceeded"]),
    reason=st.sampled_from(["", "busy"]),
    moves=st.lists(MOVES, max_size=3),
)
ALL = st.lists(EACH, max_size=20)


@given(ALL)
def test_outcomes_are_returned_as_added(added: list[Outcome]) -> None:
    held = Outcomes(added)
    assert list(held) == added
    assert len(held) == len(added)
    held.extend(Outcomes(added))
    assert list(held) == added + added


@given(ALL)
def test_outcome_columns_and_totals_equal_those_of_each_outcome(added: list[Outcome]) -> None:
    held = Outcomes(added)
    table = held.table()
    ordered = sorted(added, key=lambda outcome: outcome.number)

    def floats(values: list[float | None]) -> list[float]:
        return [nan if value is None else value for value in values]

    assert len(table) == len(added)
    assert table.failed.tolist() == [bool(each.error) for each in ordered]
    for column, values in (
        (table.ttft_s, [each.ttft_s for each in ordered]),
        (table.itl_s, [each.itl_s for each in ordered]),
        (table.e2e_s, [each.e2e_s for each in ordered]),
    ):
        assert column.tolist() == pytest.approx(floats(values), nan_ok=True)
        assert [isnan(value) for value in column] == [value is None for value in values]
    assert table.total("input_tokens") == sum(each.input_tokens for each in added)
    assert sum(table.counts("error").values()) == sum(bool(each.error) for each in added)
    assert list(table.moves()) == [(row, move) for row, each in enumerate(ordered) for move in each.moves]
    computed: dict[int, int] = {}
    for each in ordered:
        worker = each.decode if each.prefill is None else each.prefill
        if worker is not None:
            computed[worker] = computed.get(worker, 0) + each.input_tokens - each.cached_tokens
    assert table.computed_tokens == computed
    half = table.where(table.failed)
    assert half.total("crosses") == sum(each.crosses for each in added if each.error)
    moves = [move for each in added for move in each.moves if each.error]
    moved = half.moved()
    assert sum(transfers for _, transfers in moved) == len(moves)
    assert sum(move.bytes for move, _ in moved) == sum(move.bytes for move in moves)
    for move, transfers in moved:
        assert transfers == sum((each.src, each.dst) == (move.src, move.dst) for each in moves)


def test_outcome_takes_little_memory() -> None:
    a, b = {"zone": "a"}, {"zone": "b"}
    n = 20_000
    tracemalloc.start()
    held = Outcomes(
        Outcome(
            number=number,
            arrived_s=0.1 * number,
            input_tokens=1_000 + number,
            output_tokens=300,
            ceiling_tokens=number,
            first_s=0.1 * number + 1.0,
            moves=[Move(a, b, 10_000_000 + number)],
        )
        for number in range(n)
    )
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == n
    assert held_bytes / n < HELD_BYTES_MOST
