"""The ways of counting: each runs the counted process in its own, and says what came between two marks."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.instructions.marks import COUNT_CALLS, Reply

ALLOCATORS = frozenset(
    {"malloc", "calloc", "realloc", "_PyObject_Malloc", "_PyObject_Calloc", "_PyObject_Realloc"}
)
"""Functions whose calls are counted as allocations: Python's of small objects, and libc's."""

Counts = Mapping[str, int]


class Instrument(Protocol):
    """One way of counting."""

    def command(self, folder: Path, fd: int) -> Sequence[str]:
        """What the counted command is started with. ``fd`` takes what this instrument says by itself."""

    def environ(self) -> Mapping[str, str]:
        """Variables of the counted process."""

    def switch(self, pid: int, *, is_on: bool) -> None:
        """Count from the next mark on, or no longer."""

    def read(self, said: Iterator[str], reply: Reply) -> Counts:
        """Return what was counted between the last two marks, after the last one."""


class PythonCalls:
    """Calls of Python functions, by sys.setprofile; a coroutine that goes on is a call."""

    def command(self, folder: Path, fd: int) -> Sequence[str]:  # noqa: ARG002
        return ()

    def environ(self) -> Mapping[str, str]:
        return {COUNT_CALLS: "1"}

    def switch(self, pid: int, *, is_on: bool) -> None:
        pass

    def read(self, said: Iterator[str], reply: Reply) -> Counts:  # noqa: ARG002
        return {"python_calls": reply["calls"]}


class SystemCalls:
    """System calls, and turns of the event loop, by ptrace."""

    def __init__(self) -> None:
        self._marks = 0

    def command(self, folder: Path, fd: int) -> Sequence[str]:  # noqa: ARG002
        return (sys.executable, "-m", "benchmarks.instructions.syscalls", str(fd))

    def environ(self) -> Mapping[str, str]:
        return {}

    def switch(self, pid: int, *, is_on: bool) -> None:
        pass

    def read(self, said: Iterator[str], reply: Reply) -> Counts:
        line = ""
        while self._marks < reply["marks"]:
            line = next(said)
            self._marks += 1
        counts: dict[str, int] = json.loads(line)
        return counts


class Callgrind:
    """Instructions of the process, its threads too, and allocations, by valgrind's callgrind."""

    def __init__(self) -> None:
        self._out = Path()

    def command(self, folder: Path, fd: int) -> Sequence[str]:  # noqa: ARG002
        self._out = folder / "callgrind"
        return (
            *("valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no", "--dump-before=getsid*"),
            "--max-threads=4000",  # Dynamo has two for each worker
            f"--callgrind-out-file={self._out}",
        )

    def environ(self) -> Mapping[str, str]:
        return {}

    def switch(self, pid: int, *, is_on: bool) -> None:
        subprocess.run(
            ["callgrind_control", f"--instr={'on' if is_on else 'off'}", str(pid)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def read(self, said: Iterator[str], reply: Reply) -> Counts:  # noqa: ARG002
        dumps = sorted(self._out.parent.glob(f"{self._out.name}.*"), key=lambda path: int(path.suffix[1:]))
        counts = read_dump(dumps[-1]) if dumps else {}
        for dump in dumps:
            dump.unlink()
        return counts


def read_dump(path: Path) -> Counts:
    """Return what a file of callgrind's holds."""
    instructions, allocations = 0, 0
    names: dict[str, str] = {}
    called = ""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (found := _FUNCTION.match(line)) is not None:
                number, name = found["number"], found["name"]
                if name:
                    names[number] = name
                if found["kind"] == "cfn":
                    called = names[number]
            elif line.startswith("calls="):
                if called.partition("'")[0] in ALLOCATORS:
                    allocations += int(line[len("calls=") :].split()[0])
            elif line.startswith("totals:"):
                instructions = int(line.split()[1])
    return {"instructions": instructions, "allocations": allocations}


_FUNCTION = re.compile(r"(?P<kind>c?fn)=\((?P<number>\d+)\)(?: (?P<name>.+))?")


def valgrind_version() -> str | None:
    """Return the version of valgrind, None where it or its control is not installed."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return None
    return subprocess.run(
        ["valgrind", "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()


def why_no_ptrace() -> str | None:
    """Return why system calls cannot be counted here, None where they can."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions.syscalls", "2", "true"],
        check=False,
        capture_output=True,
        text=True,
    )
    return None if ran.returncode == 0 else ran.stderr.strip().rpartition("\n")[2]


@contextmanager
def pipe_lines() -> Iterator[tuple[int, Iterator[str]]]:
    """Yield a descriptor to write to, and the lines that are written to it."""
    read, write = os.pipe()
    try:
        with os.fdopen(read, encoding="utf-8") as lines:
            yield write, lines
    finally:
        os.close(write)
