"""Counted costs: what is compared with the last row of the data, and what a row must have."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.http_replay.machine import Commit
from benchmarks.instructions.__main__ import least
from benchmarks.instructions.count import COSTS, RANKS, WORDS, Figure
from benchmarks.instructions.instruments import read_dump
from benchmarks.instructions.marks import COUNT_CALLS
from benchmarks.instructions.rows import (
    BY_BUILD,
    BY_PYTHON,
    FILE,
    SAME_EVERYWHERE,
    Build,
    Row,
    append_row,
    compare,
    read_rows,
)

BUILD = Build(
    python="3.11.7 (main) [GCC 12.2.0]", libc="glibc 2.36", valgrind="valgrind-3.19.0", cpu=("x86_64", "avx2")
)
REQUEST = "request, 32 words, whole"
FIGURES = {
    REQUEST: {
        "instructions": 2e6,
        "allocations": 1500.0,
        "python_calls": 900.0,
        "syscalls": 24.0,
        "turns": 10.0,
    }
}
ROW = Row(Commit("abc", changed=False), "the first row", "3.11", BUILD, FIGURES)


def measured(**grown: float) -> dict[str, dict[str, float]]:
    return {
        operation: {what: count * grown.get(what, 1.0) for what, count in counts.items()}
        for operation, counts in FIGURES.items()
    }


@pytest.mark.parametrize("what", sorted(SAME_EVERYWHERE | BY_PYTHON | BY_BUILD))
def test_growth_of_six_percent_fails_the_gate_and_of_four_passes(what: str) -> None:
    assert compare(ROW, measured(**{what: 1.04}), python="3.11", build=BUILD).is_good
    compared = compare(ROW, measured(**{what: 1.06}), python="3.11", build=BUILD)
    assert not compared.is_good
    (line,) = compared.lines
    assert REQUEST in line
    assert what in line
    assert "+6.0%" in line


@pytest.mark.parametrize("what", ["syscalls", "turns"])
def test_a_turn_more_for_each_operation_grew_and_for_a_few_is_chance(what: str) -> None:
    row = msgspec.structs.replace(ROW, figures={REQUEST: {what: 4.0}})
    assert compare(row, {REQUEST: {what: 4.4}}, python="3.11", build=BUILD).is_good
    assert not compare(row, {REQUEST: {what: 5.0}}, python="3.11", build=BUILD).is_good


def test_a_lower_figure_passes_the_gate() -> None:
    fallen = measured(instructions=0.5, turns=0.5, python_calls=0.1)
    assert compare(ROW, fallen, python="3.11", build=BUILD).is_good


def test_growth_in_small_steps_is_judged_against_the_last_row() -> None:
    steps = [1.03, 1.03**2]
    good = [compare(ROW, measured(instructions=step), python="3.11", build=BUILD).is_good for step in steps]
    assert good == [True, False]


def test_a_new_row_with_a_reason_accepts_the_growth(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    grown = measured(instructions=1.06)
    append_row(path, ROW)
    append_row(path, msgspec.structs.replace(ROW, reason="spans are on", figures=grown))
    assert compare(read_rows(path)[-1], grown, python="3.11", build=BUILD).is_good


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_row_without_a_reason_fails_the_gate(reason: str) -> None:
    row = msgspec.structs.replace(ROW, reason=reason)
    compared = compare(row, measured(), python="3.11", build=BUILD)
    assert not compared.is_good
    assert "reason" in compared.lines[0]


@dataclass(frozen=True)
class Elsewhere:
    """Another machine: what is compared there, and what it says."""

    python: str
    build: Build
    compared: frozenset[str]
    said: str


ELSEWHERE = {
    "python": Elsewhere(
        "3.12",
        msgspec.structs.replace(BUILD, python="3.12.1 (main) [GCC 12.2.0]"),
        SAME_EVERYWHERE,
        "Python 3.12 here, 3.11 in the row",
    ),
    "patch": Elsewhere(
        "3.11",
        msgspec.structs.replace(BUILD, python="3.11.9 (main) [GCC 12.2.0]"),
        SAME_EVERYWHERE | BY_PYTHON,
        "python: 3.11.9",
    ),
    "libc": Elsewhere(
        "3.11",
        msgspec.structs.replace(BUILD, libc="glibc 2.40"),
        SAME_EVERYWHERE | BY_PYTHON,
        "libc: glibc 2.40 here, glibc 2.36 in the row",
    ),
    "processor": Elsewhere(
        "3.11", msgspec.structs.replace(BUILD, cpu=("x86_64",)), SAME_EVERYWHERE | BY_PYTHON, "cpu: "
    ),
    "no valgrind": Elsewhere(
        "3.11",
        msgspec.structs.replace(BUILD, valgrind=None),
        SAME_EVERYWHERE | BY_PYTHON,
        "valgrind is not installed here",
    ),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_another_python_or_build_compares_only_portable_figures(elsewhere: Elsewhere) -> None:
    for what in sorted(SAME_EVERYWHERE | BY_PYTHON | BY_BUILD):
        compared = compare(ROW, measured(**{what: 1.06}), python=elsewhere.python, build=elsewhere.build)
        assert compared.is_good == (what not in elsewhere.compared), what
        assert any("NOT COMPARED" in line and elsewhere.said in line for line in compared.lines)


def test_a_missing_or_new_operation_fails_the_gate() -> None:
    assert not compare(ROW, {}, python="3.11", build=BUILD).is_good
    assert not compare(ROW, {**measured(), "another": {"turns": 1.0}}, python="3.11", build=BUILD).is_good


def test_a_figure_growing_from_zero_fails_the_gate() -> None:
    row = msgspec.structs.replace(ROW, figures={"decision": {"syscalls": 0.0}})
    assert not compare(row, {"decision": {"syscalls": 1.0}}, python="3.11", build=BUILD).is_good
    assert compare(row, {"decision": {"syscalls": 0.02}}, python="3.11", build=BUILD).is_good


def test_every_row_has_a_reason_and_the_last_every_operation() -> None:
    rows = read_rows(FILE)
    assert all(row.reason.strip() for row in rows)
    operations = {
        "one more streamed token",
        *(f"request, {words:,} words, {how}" for words in WORDS for how in ("whole", "streamed")),
        *(f"decision with booking, {ranks:,} ranks, cost of {cost}" for ranks in RANKS for cost in COSTS),
    }
    assert rows[-1].figures.keys() == operations
    assert all(
        counts.keys() == SAME_EVERYWHERE | BY_PYTHON | BY_BUILD for counts in rows[-1].figures.values()
    )


def test_marks_count_python_calls_of_all_threads() -> None:
    program = """
import json, threading
from benchmarks.instructions.marks import Marks

def called():
    return len([])

marks = Marks()
counts = [marks.mark()["calls"], marks.mark()["calls"]]
for _ in range(5):
    called()
counts.append(marks.mark()["calls"])
thread = threading.Thread(target=called)
counts.append(marks.mark()["calls"])
thread.start()
thread.join()
counts.append(marks.mark()["calls"])
print(json.dumps(counts))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, COUNT_CALLS: "1"},
        check=True,
        capture_output=True,
    )
    _, empty, five, _, in_a_thread = json.loads(ran.stdout)
    assert five == empty + 5
    assert in_a_thread > empty


def test_a_callgrind_dump_gives_instructions_and_allocations(tmp_path: Path) -> None:
    dump = tmp_path / "callgrind.1"
    dump.write_text(
        "events: Ir\n"
        "fn=(1) _PyEval_EvalFrameDefault\n0 10\n"
        "cfn=(2) _PyObject_Malloc\ncalls=7 12\n0 70\n"
        "cfn=(3) _PyObject_Free\ncalls=5 12\n0 70\n"
        "\nfn=(4) malloc'2\n0 3\n"
        "cfn=(4)\ncalls=2 9\n0 3\n"
        "totals: 1234\n"
    )
    assert read_dump(dump) == {"instructions": 1234, "allocations": 9}


def test_the_least_of_two_counts_is_taken_for_each_figure() -> None:
    first = {REQUEST: {"syscalls": Figure(39.0, 0.0), "turns": Figure(6.0, 0.0)}}
    again = {REQUEST: {"syscalls": Figure(36.5, 0.1), "turns": Figure(6.2, 0.0)}}
    assert least(first, again) == {REQUEST: {"syscalls": Figure(36.5, 0.1), "turns": Figure(6.0, 0.0)}}
