"""Mooncake's rows with sessions: when turns come, and which blocks they name."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.cli import main
from kvrouter.sim.traces.read import open_trace
from tests.support.traces import dialogue, lines


def test_a_turn_follows_the_answer_before_it_after_its_delay(write_trace: Callable[[bytes], Path]) -> None:
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
        assert (other.after, first.after) == (None, None)
        assert (second.after, second.think_s, second.session) == (1, 0.25, "s")
        assert second.pieces == array("Q", [1, 3, 4])


def test_a_time_stamp_alone_makes_what_passed_the_think_time(write_trace: Callable[[bytes], Path]) -> None:
    content = lines(
        dialogue("s", 700, [1, 2], timestamp=1_000),
        dialogue("s", 700, [1, 2], timestamp=4_000),
        dialogue("s", 700, [1, 2], timestamp=9_000, delay=500),
    )
    trace = open_trace(write_trace(content))
    assert trace.info.has_times
    assert [(row.at_s, row.think_s) for row in trace] == [(0.0, 0.0), (3.0, 3.0), (8.0, 0.5)]


@pytest.mark.parametrize("block_size", [16, 64, 512, 1_024])
def test_the_block_size_is_one_that_fits_the_rows(
    write_trace: Callable[[bytes], Path], block_size: int
) -> None:
    sizes = [block_size * 9 + 1, block_size * 20]
    rows = [dialogue(str(n), n, list(range(-(-n // block_size))), timestamp=0) for n in sizes]
    assert open_trace(write_trace(lines(*rows))).info.piece_tokens == block_size


def test_turns_too_short_for_a_common_block_are_read_where_they_grow(
    write_trace: Callable[[bytes], Path],
) -> None:
    rows = [dialogue("s", n, [n], timestamp=n) for n in (100, 200, 300)]
    assert [row.after for row in open_trace(write_trace(lines(*rows)))] == [None, 0, 1]


def test_one_turn_that_begins_as_the_one_before_shows_whole_prompts(
    write_trace: Callable[[bytes], Path],
) -> None:
    ids = ([1, 2], [8, 9], [8, 9])  # the second begins anew
    rows = [dialogue("s", 700, each, timestamp=at) for at, each in enumerate(ids)]
    assert len(list(open_trace(write_trace(lines(*rows))))) == 3


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 50), st.sampled_from(["timestamp", "delay", "both"])
        ),
        min_size=1,
        max_size=12,
    )
)
def test_turns_come_in_the_order_of_time_and_after_the_one_before(
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
    found = list(open_trace(scratch_trace))
    assert [row.number for row in found] == list(range(len(rows)))
    assert sorted(row.line for row in found) == list(range(1, len(rows) + 1))
    assert [row.at_s for row in found] == sorted(row.at_s for row in found)
    for row in found:
        if row.after is None:
            assert row.line == min(each.line for each in found if each.session == row.session)
        else:
            before = found[row.after]
            assert (before.session, before.line < row.line) == (row.session, True)


def test_delays_without_times_need_a_closed_loop(
    write_trace: Callable[[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dialogue("s", 700, [1, 2], timestamp=0), dialogue("s", 1_100, [1, 3, 4], delay=250)]
    path = write_trace(lines(*rows))
    assert main(["replay", str(path)]) == 2
    assert "--dispatch closed" in capsys.readouterr().err
    assert main(["replay", str(path), "--dispatch", "closed"]) == 0
    assert "Mooncake with sessions, dispatched closed loop" in " ".join(capsys.readouterr().out.split())
