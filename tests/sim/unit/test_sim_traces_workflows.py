"""``dynamo.agentic_mooncake``: requests that wait for several others, by name."""

import re
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
from kvrouter.sim.traces.trace_request import TraceRequest, Wait
from tests.testing.trace_rows import (
    HEADER,
    by_other_names,
    dependency,
    dialogue,
    lines,
    mooncake,
    node,
    waiting,
)

PAGE = Path(__file__).parents[3] / "docs/replay.md"

FORK = [
    waiting("plan", timestamp=500),
    waiting("left", "plan", ids=(1, 2), delay=20, tool_wait_ms=30),
    waiting("right", "plan", ids=(1, 3), tool_wait_ms=10),
    waiting("sum", "left", "right", ids=(1, 4), delay=5),
]


def test_workflow_rows_without_a_header_are_read(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(lines(*FORK)))
    assert (trace.info.format, trace.info.piece_tokens) == ("dynamo.agentic_mooncake", 512)
    assert "no field says how large blocks are" in trace.info.notes[0]
    assert (trace.info.has_sessions, trace.info.has_times) == (True, False)
    for _ in range(2):
        plan, right, left, last = trace
        assert [row.number for row in (plan, right, left, last)] == [0, 1, 2, 3]
        assert [row.line for row in (plan, right, left, last)] == [1, 3, 2, 4]
        assert [row.at_s for row in (plan, right, left, last)] == [0.0, 0.01, 0.05, 0.055]
        assert (plan.waits, right.waits, left.waits) == ((), (Wait(0, 0.01),), (Wait(0, 0.05),))
        assert last.waits == (Wait(2, 0.005), Wait(1, 0.005))
        assert last.pieces == array("Q", [1, 4])
        assert {row.session for row in trace} == {"s"}
        assert {row.not_before_s for row in trace} == {0.0}


def test_example_rows_of_the_replay_page_are_a_trace(write_trace: Callable[[bytes], Path]) -> None:
    (rows,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    trace = open_trace(write_trace(rows.encode()))
    assert [(row.line, row.waits) for row in trace] == [
        (1, ()),
        (3, (Wait(0, 0.02),)),
        (2, (Wait(0, 0.32),)),
        (4, (Wait(2, 0.005), Wait(1, 0.005))),
    ]


def test_workflow_rows_may_stand_in_any_order(write_trace: Callable[[bytes], Path]) -> None:
    def what(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
        trace = open_trace(write_trace(lines(*rows)))
        return [(row.number, row.at_s, row.waits, row.pieces) for row in trace]

    assert what(FORK[::-1]) == what(FORK)


def test_time_stamps_of_workflow_rows_are_kept(write_trace: Callable[[bytes], Path]) -> None:
    rows = [{**row, "timestamp": at} for row, at in zip(FORK, (500, 2_000, 1_000, 9_000), strict=True)]
    trace = open_trace(write_trace(lines(*rows)))
    assert trace.info.has_times
    assert [row.at_s for row in trace] == [0.0, 0.5, 1.5, 8.5]
    assert [row.line for row in trace] == [1, 3, 2, 4]


def test_workflow_format_is_recognized_when_only_later_rows_wait(
    write_trace: Callable[[bytes], Path],
) -> None:
    trace = open_trace(write_trace(lines(waiting("a", timestamp=0), waiting("b", timestamp=9), *FORK)))
    assert trace.info.format == "dynamo.agentic_mooncake"
    assert [row.waits for row in trace][:2] == [(), ()]
    alone = [{**mooncake(at, 700, [1, 2]), "request_id": str(at)} for at in (0, 1)]
    assert open_trace(write_trace(lines(*alone))).info.format == "Mooncake"
    turns = [{**row, "session_id": "s", "input_length": 700 + n} for n, row in enumerate(alone)]
    assert open_trace(write_trace(lines(*turns))).info.format == "Mooncake with sessions"


NODES = [
    node("plan", 100),
    node("left", 150, dependency("plan", 50, "dispatch"), ids=(1, 2)),
    node("right", 400, dependency("plan", 20), ids=(1, 3), session_id="t"),
    node("sum", 900, dependency("left", 1), dependency("right", 2), ids=(1, 4)),
]


def test_workflow_rows_of_version_2_are_read(write_trace: Callable[[bytes], Path]) -> None:
    trace = open_trace(write_trace(lines(HEADER, *NODES)))
    assert (trace.info.format, trace.info.piece_tokens) == ("dynamo.agentic_mooncake", 64)
    assert trace.info.notes == ()
    assert (trace.info.has_sessions, trace.info.has_times) == (True, True)
    for _ in range(2):
        plan, left, right, last = trace
        assert [row.line for row in (plan, left, right, last)] == [2, 3, 4, 5]
        assert [row.at_s for row in (plan, left, right, last)] == [0.0, 0.05, 0.3, 0.8]
        assert [row.not_before_s for row in (plan, left, right, last)] == [0.0, 0.05, 0.3, 0.8]
        assert plan.waits == ()
        assert left.waits == (Wait(0, 0.05, for_arrival=True),)
        assert right.waits == (Wait(0, 0.02),)
        assert last.waits == (Wait(1, 0.001), Wait(2, 0.002))
        assert [row.session for row in (plan, left, right, last)] == ["p/s", "p/s", "p/t", "p/s"]
        assert plan.pieces[0] == left.pieces[0] == last.pieces[0]
        assert left.pieces[1] != right.pieces[1]


def test_block_and_session_names_belong_to_a_play(write_trace: Callable[[bytes], Path]) -> None:
    rows = [node("a", 0), node("b", 1, play_id="q"), node("c", 2)]
    first, other, last = open_trace(write_trace(lines(HEADER, *rows)))
    assert (first.pieces, first.session) == (last.pieces, last.session)
    assert first.pieces != other.pieces
    assert other.session == "q/s"


@pytest.mark.parametrize(
    ("row", "has_times"),
    [
        (node("b", 100, dependency("a")), False),  # an answer takes time
        (node("b", 100, dependency("a", trigger="dispatch")), True),
        (node("b", 149.5, dependency("a", 50)), True),  # clocks are rounded
        (node("b", 148.5, dependency("a", 50)), False),
        (node("b", 0, dependency("a", 50)), False),
    ],
)
def test_trace_has_no_times_where_a_request_may_come_before_its_dependency(
    write_trace: Callable[[bytes], Path], row: dict[str, Any], has_times: bool
) -> None:
    trace = open_trace(write_trace(lines(HEADER, node("a", 100), row)))
    assert trace.info.has_times is has_times
    first, second = trace
    assert (first.line, second.line) == (2, 3)


def test_workflow_fields_are_read_under_their_other_names(write_trace: Callable[[bytes], Path]) -> None:
    plain = list(open_trace(write_trace(lines(*FORK))))
    assert list(open_trace(write_trace(lines(*map(by_other_names, FORK))))) == plain


CIRCLE = [
    waiting("z", timestamp=0),
    waiting("y", "a", "z"),
    waiting("a", "z", "c"),
    waiting("b", "a"),
    waiting("c", "z", "b"),
]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*FORK, waiting("x", "plan", "none")], r":5: wait_for\[1\]: no row has the request_id 'none'"),
        ([*FORK, waiting("x", "x")], r":5: wait_for\[0\]: 'x' is the request itself, so none"),
        (CIRCLE, r":3: wait_for\[1\]: 'c' waits for 'a' in its turn, so none of them can come"),
        ([*FORK, waiting("plan", timestamp=1)], r":5: request_id: 'plan' is that of line 1, too"),
        ([*FORK, waiting("", timestamp=1)], r":5: request_id: expected `str` of length >= 1"),
        ([*FORK, waiting("x")], r":5: timestamp: is missing, and the request waits for no other"),
        ([*FORK, waiting("x", timestamp=1, delay=2)], r":5: delay: is there, and the request waits for no"),
        ([*FORK, waiting("x", timestamp=1, tool_wait_ms=2)], r":5: tool_wait_ms: is there, and the request"),
        ([*FORK, waiting("x", "plan", timestamp=499)], r":5: timestamp: 499 is before 500 of 'plan', which"),
        ([*FORK, waiting("x", "plan", delay=-1)], r":5: delay: "),
        ([*FORK, waiting("x", "plan", tool_wait_ms=float("nan"))], r":5: tool_wait_ms: NaN is not a number"),
        ([*FORK, waiting("x", "plan", delay=1, delay_ms=1)], r":5: delay_ms: is another name of delay"),
        ([*FORK, waiting("x", wait_for=[7])], r":5: wait_for\[0\]: expected `str`, got `int`"),
        ([*FORK, waiting("x", "plan", dependencies=[])], r":5: dependencies: is of version 2, whose first"),
        ([*FORK, {**waiting("x", "plan"), "hash_ids": [1, 2]}], r":5: hash_ids: 2 of them, where 512 tokens"),
        ([*FORK, {"wait_for": ["plan"]}], r":5: (hash_ids|request_id): is missing"),
        ([node("a", 0)], r":1: dependencies: is of version 2, whose first line is a header"),
        ([HEADER], r": has a header and no requests"),
        ([{**HEADER, "version": 3}, *NODES], r":1: version: 3 is not 2"),
        ([{**HEADER, "hash_id_scope": "global"}, *NODES], r":1: hash_id_scope: invalid enum value 'global'"),
        ([{**HEADER, "block_size": 0}, *NODES], r":1: block_size: "),
        ([HEADER, *NODES, waiting("x", "plan")], r":6: (play_id|not_before_ms): is missing"),
        ([HEADER, *NODES, node("x", 1, wait_for=["plan"])], r":6: wait_for: is of rows without a header"),
        ([HEADER, *NODES, node("x", 1, dependency("y"))], r":6: dependencies\[0\].request_id: no row has"),
        (
            [HEADER, *NODES, node("x", 1, dependency("y")), node("y", 1, dependency("x"))],
            r":6: dependencies\[0\].request_id: 'y' waits for 'x' in its turn",
        ),
        (
            [HEADER, *NODES, node("x", 1, dependency("plan"), play_id="q")],
            r":6: dependencies\[0\].request_id: 'plan' is of the play 'p', and the request of 'q'",
        ),
        ([HEADER, *NODES, node("x", 1, dependency("plan", -1))], r":6: dependencies\[0\].delay_ms: "),
        ([HEADER, *NODES, node("x", 1, dependency("plan", 1, "end"))], r":6: dependencies\[0\].trigger: "),
        ([HEADER, *NODES, node("x", -1)], r":6: not_before_ms: "),
        ([HEADER, *NODES, {**node("x", 1), "hash_ids": [1, 2]}], r":6: hash_ids: 2 of them, where 64 tokens"),
        ([dialogue("s", 700, [7, 8], timestamp=5), waiting("x", "y")], r":2: wait_for: is there, and"),
    ],
)  # fmt: skip
def test_workflow_mistake_is_refused_with_its_line_and_field(
    write_trace: Callable[[bytes], Path], rows: list[dict[str, Any]], message: str
) -> None:
    path = write_trace(lines(*rows))
    with pytest.raises(ConfigError, match=f"^{path}{message}"):
        list(open_trace(path))


@given(data=st.data(), n_requests=st.integers(1, 12))
def test_requests_come_after_all_they_wait_for(
    scratch_trace: Path, data: st.DataObject, n_requests: int
) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(n_requests):
        others = data.draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        times: dict[str, int] = {} if others else {"timestamp": data.draw(st.integers(0, 50))}
        if others:
            times["delay"] = data.draw(st.integers(0, 9))
        rows.append(waiting(str(number), *map(str, sorted(others)), ids=(number,), **times))
    scratch_trace.write_bytes(lines(waiting("last", "0", ids=(99,)), *data.draw(st.permutations(rows))))
    found: list[TraceRequest] = list(open_trace(scratch_trace))
    assert [row.number for row in found] == list(range(n_requests + 1))
    assert [row.at_s for row in found] == sorted(row.at_s for row in found)
    named = {str(row.pieces[0]): row for row in found}
    for row in rows:
        one = named[row["request_id"]]
        assert [wait.number for wait in one.waits] == [named[name].number for name in row.get("wait_for", [])]
        assert all(wait.number < one.number for wait in one.waits)
        assert {wait.think_s for wait in one.waits} <= {row.get("delay", 0) / 1e3}


def test_workflow_trace_is_replayed_from_the_command_line(
    write_trace: Callable[[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(lines(*FORK))
    assert main(["replay", str(path)]) == 2
    assert "--dispatch closed" in capsys.readouterr().err
    assert main(["replay", str(path), "--dispatch", "closed"]) == 0
    assert "dynamo.agentic_mooncake, dispatched closed loop" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(write_trace(lines(HEADER, *NODES)))]) == 0
    assert "dynamo.agentic_mooncake, dispatched by time stamp" in " ".join(capsys.readouterr().out.split())
