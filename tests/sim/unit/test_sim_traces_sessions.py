"""Mooncake's rows with sessions: when turns come, and which blocks they name."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.cli import main
from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import Wait
from tests.testing.trace_rows import SESSIONS, by_other_names, dialogue, lines, mooncake


def test_turn_follows_the_answer_before_it_after_its_delay(write_trace: Callable[[bytes], Path]) -> None:
    content = lines(
        dialogue("s", 700, [1, 2], timestamp=2_000),
        dialogue("s", 1_100, [1, 3, 4], delay=250),
        dialogue("t", 600, [8, 9], timestamp=1_500),
    )
    trace = open_trace(write_trace(content))
    assert (trace.info.format, trace.info.piece_tokens) == ("Mooncake with sessions", 512)
    assert (trace.info.has_sessions, trace.info.has_times) == (True, False)
    for _ in range(2):
        other, first, second = trace
        assert [row.number for row in (other, first, second)] == [0, 1, 2]
        assert [row.line for row in (other, first, second)] == [3, 1, 2]
        assert [row.at_s for row in (other, first, second)] == [0.0, 0.5, 0.75]
        assert (other.waits, first.waits) == ((), ())
        assert (second.waits, second.session) == ((Wait(1, 0.25),), "s")
        assert second.pieces == array("Q", [1, 3, 4])


def test_turn_with_a_time_stamp_alone_thinks_for_the_time_between(
    write_trace: Callable[[bytes], Path],
) -> None:
    content = lines(
        dialogue("s", 700, [1, 2], timestamp=1_000),
        dialogue("s", 800, [1, 2], timestamp=4_000),
        dialogue("s", 900, [1, 2], timestamp=9_000, delay=500),
    )
    trace = open_trace(write_trace(content))
    assert trace.info.has_times
    assert [(row.at_s, row.waits) for row in trace] == [
        (0.0, ()),
        (3.0, (Wait(0, 3.0),)),
        (8.0, (Wait(1, 0.5),)),
    ]


@pytest.mark.parametrize("block_size", [16, 64, 512, 1_024])
def test_block_size_is_one_that_fits_the_rows(write_trace: Callable[[bytes], Path], block_size: int) -> None:
    sizes = [block_size * 9 + 1, block_size * 20]
    rows = [dialogue(str(n), n, list(range(-(-n // block_size))), timestamp=0) for n in sizes]
    info = open_trace(write_trace(lines(*rows))).info
    assert info.piece_tokens == block_size
    assert info.notes == (f"no field says how large blocks are: {block_size} tokens fit all rows",)


SHORT = ((100, [1]), (200, [2]), (300, [3]))
"""Turns with no whole block, which grow: whole prompts, or what longer and longer turns add."""

AS_MANY = ((700, [1, 2]), (700, [8, 9]), (800, [8, 9]))
"""One turn that goes on from the one before, and one that does not."""

MORE_OTHERS = (*AS_MANY, (700, [5, 6]))

THE_SAME = ((700, [1, 2]), (700, [1, 2]))
"""A prompt that is sent again, or two turns that add the same."""

SHORTER = ((300, [1]), (200, [2]))


@pytest.mark.parametrize("turns", [SHORT, MORE_OTHERS, THE_SAME, SHORTER])
def test_ambiguous_turns_need_the_trace_format_to_be_named(
    write_trace: Callable[[bytes], Path], turns: tuple[tuple[int, list[int]], ...]
) -> None:
    rows = [dialogue("s", tokens, ids, timestamp=at) for at, (tokens, ids) in enumerate(turns)]
    path = write_trace(lines(dialogue("t", 600, [7, 9], timestamp=0), *rows))
    with pytest.raises(ConfigError, match=rf"{path}:3: hash_ids: do not say .*--trace-format mooncake-delta"):
        open_trace(path)
    whole = list(open_trace(path, trace_format="mooncake"))
    assert [row.input_tokens for row in whole if row.session == "s"] == [tokens for tokens, _ in turns]
    grown = [row for row in open_trace(path, trace_format="mooncake-delta") if row.session == "s"]
    added = [tokens for tokens, _ in turns]
    assert [row.input_tokens for row in grown] == [sum(added[: n + 1]) + 5 * n for n in range(len(added))]


@pytest.mark.parametrize("turns", [AS_MANY, AS_MANY[1:], SHORT[:1]])
def test_turns_that_continue_the_one_before_are_read_as_whole_prompts(
    write_trace: Callable[[bytes], Path], turns: tuple[tuple[int, list[int]], ...]
) -> None:
    rows = [dialogue("s", tokens, ids, timestamp=at) for at, (tokens, ids) in enumerate(turns)]
    trace = open_trace(write_trace(lines(*rows)))
    assert [row.input_tokens for row in trace] == [tokens for tokens, _ in turns]


def test_named_trace_format_must_be_that_of_the_trace(write_trace: Callable[[bytes], Path]) -> None:
    path = write_trace(lines(mooncake(0, 700, [1, 2])))
    assert len(list(open_trace(path, trace_format="mooncake"))) == 1
    with pytest.raises(ConfigError, match=r"trace_format: mooncake-delta is a form of .* Mooncake$"):
        open_trace(path, trace_format="mooncake-delta")
    with pytest.raises(ConfigError, match=r"trace_format: mooncake is a form of .* agentic sessions$"):
        open_trace(write_trace(lines(*SESSIONS)), trace_format="mooncake")


def test_fields_are_read_under_the_other_names_that_dynamo_reads(
    write_trace: Callable[[bytes], Path],
) -> None:
    rows = [
        dialogue("s", 700, [1, 2], timestamp=5),
        dialogue("s", 1_100, [1, 3, 4], delay=250),
        dialogue("s", 1_200, [1, 3, 4], timestamp=9_000),
    ]
    plain = list(open_trace(write_trace(lines(*rows))))
    assert list(open_trace(write_trace(lines(*map(by_other_names, rows))))) == plain
    assert list(open_trace(write_trace(lines(rows[0], *map(by_other_names, rows[1:]))))) == plain
    alone = [mooncake(5, 700, [1, 2]), mooncake(6, 800, [1, 2], 0)]
    plain = list(open_trace(write_trace(lines(*alone))))
    assert list(open_trace(write_trace(lines(*map(by_other_names, alone))))) == plain


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 50), st.sampled_from(["timestamp", "delay", "both"])
        ),
        min_size=1,
        max_size=12,
    )
)
def test_turns_come_in_order_of_time_and_after_the_turn_before(
    scratch_trace: Path, rows: list[tuple[str, int, str]]
) -> None:
    at_ms: dict[str, float] = {}
    made: list[dict[str, Any]] = []
    for name, step, kind in rows:
        times = {"delay": float(step)} if kind != "timestamp" and name in at_ms else {}
        at_ms[name] = at_ms.get(name, 0.0) + step
        if kind != "delay" or not times:
            times["timestamp"] = at_ms[name]
        made.append(dialogue(name, 700, [1, 2], **times))
    scratch_trace.write_bytes(lines(*made))
    found = list(open_trace(scratch_trace, trace_format="mooncake"))
    assert [row.number for row in found] == list(range(len(rows)))
    assert sorted(row.line for row in found) == list(range(1, len(rows) + 1))
    assert [row.at_s for row in found] == sorted(row.at_s for row in found)
    for row in found:
        earlier = [each for each in found if each.session == row.session and each.line < row.line]
        assert [found[wait.number] for wait in row.waits] == earlier[-1:]


def test_delays_without_times_need_a_closed_loop(
    write_trace: Callable[[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dialogue("s", 700, [1, 2], timestamp=0), dialogue("s", 1_100, [1, 3, 4], delay=250)]
    path = write_trace(lines(*rows))
    assert main(["replay", str(path)]) == 2
    assert "--dispatch closed" in capsys.readouterr().err
    assert main(["replay", str(path), "--dispatch", "closed"]) == 0
    assert "Mooncake with sessions, dispatched closed loop" in " ".join(capsys.readouterr().out.split())
