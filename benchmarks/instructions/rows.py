"""The figures as data, a row by commit with its reason, and what may be compared with what."""

import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.http_replay.machine import CPU_INFO, Commit
from benchmarks.results import RESULTS

FILE = RESULTS / "instructions.jsonl"
GROWN_BY = 0.05
"""A figure that is greater by more than this part than the last row's needs a row of its own."""
MORE_BY = {"syscalls": 0.5, "turns": 0.5}
"""A figure that grew by less than this for an operation did not grow: how bytes and tasks fall into turns
of the loop depends on the machine, and whoever adds a turn or a system call adds one to each operation."""
MORE_OF_OTHERS_BY = 0.1
"""The same for all other figures."""

SAME_EVERYWHERE = frozenset({"turns"})
BY_PYTHON = frozenset({"python_calls", "syscalls"})
BY_BUILD = frozenset({"instructions", "allocations"})
_FLAGS = ("avx", "avx2", "f16c", "rdrand", "rdseed", "fma", "bmi1", "bmi2", "abm")
"""Of processors, by which valgrind decides what it lets a program see."""

Measured = Mapping[str, Mapping[str, float]]
"""By operation and by what was counted, per operation."""


class Build(msgspec.Struct, frozen=True):
    """What instructions and allocations depend on, beside kvrouter and its packages."""

    python: str
    """The version, and the compiler that made it."""

    libc: str
    valgrind: str | None
    """None where it is not installed: nothing that it counts is in the row."""

    cpu: tuple[str, ...]
    """The flags of the processor that decide which functions of libraries run under valgrind."""


class Row(msgspec.Struct, frozen=True):
    """What the operations cost at a commit, and why a figure differs from the row before."""

    commit: Commit
    reason: str
    python: str
    """Its minor version."""

    build: Build
    figures: Measured


class Compared(msgspec.Struct, frozen=True):
    """What came of a comparison: lines for people. ``is_good`` is False where the gate must stop."""

    lines: tuple[str, ...]
    is_good: bool


def this_build(valgrind: str | None) -> Build:
    """Read what counts depend on here."""
    flags: set[str] = set()
    if CPU_INFO.is_file():
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
        flags = set(found[1].split()) if found is not None else flags
    return Build(
        python=" ".join(sys.version.split()),
        libc=" ".join(platform.libc_ver()),
        valgrind=valgrind,
        cpu=(platform.machine(), *(flag for flag in _FLAGS if flag in flags)),
    )


def this_python() -> str:
    """The minor version of Python that runs."""
    return "{}.{}".format(*sys.version_info)


def read_rows(path: Path) -> list[Row]:
    """Read every row, the oldest first. Raises msgspec's ValidationError for what is none."""
    return msgspec.json.Decoder(Row).decode_lines(path.read_bytes())


def append_row(path: Path, row: Row) -> None:
    """Add a row."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def compare(last: Row, measured: Measured, *, python: str, build: Build) -> Compared:
    """Compare what was measured here with the last row of the file, as far as they can be compared.

    Turns of the loop are the same everywhere, calls and system calls with one minor version of Python,
    instructions and allocations with one build of Python, libc and valgrind and one kind of processor. What
    cannot be compared is said, and is no failure. A row without a reason is one.
    """
    lines = []
    is_good = True
    if not last.reason.strip():
        is_good = False
        lines.append(f"{last.commit.id}: the last row has no reason: say what the figures grew for")
    comparable = set(SAME_EVERYWHERE)
    if python == last.python:
        comparable |= BY_PYTHON
    else:
        lines.append(f"NOT COMPARED: calls and system calls: Python {python} here, {last.python} in the row")
    differing = _differing(last.build, build)
    if differing:
        lines.append(f"NOT COMPARED: instructions and allocations: {differing}")
    else:
        comparable |= BY_BUILD
    for operation, counts in measured.items():
        for what, count in counts.items():
            before = last.figures.get(operation, {}).get(what)
            if what not in comparable:
                continue
            if before is None:
                is_good = False
                lines.append(f"{operation}: {what}: {count:,.1f}, and the last row has no such figure")
            elif count > max(before * (1 + GROWN_BY), before + MORE_BY.get(what, MORE_OF_OTHERS_BY)):
                is_good = False
                lines.append(
                    f"{operation}: {what}: {count:,.1f}, was {before:,.1f}: {_growth(count, before)}"
                )
    missing = last.figures.keys() - measured.keys()
    if missing:
        is_good = False
        lines.append(f"not measured, and in the last row: {', '.join(sorted(missing))}")
    return Compared(tuple(lines), is_good)


def _growth(count: float, before: float) -> str:
    return f"{count / before - 1:+.1%}" if before else "was none"


def _differing(row: Build, here: Build) -> str:
    """Say which facts of two builds differ, nothing where none does."""
    if here.valgrind is None:
        return "valgrind is not installed here"
    return "; ".join(
        f"{name}: {getattr(here, name)} here, {getattr(row, name)} in the row"
        for name in Build.__struct_fields__
        if getattr(here, name) != getattr(row, name)
    )
