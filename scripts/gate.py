"""Run what a change must pass, and print what each part of it took.

    python -m scripts.gate [--slowest N] [--record]

Each part is a target of the Makefile. Parts that leave a core idle run side by side, in two lanes; the tests
of ``make test`` fill both cores and run alone, as do those that measure time. For a test, the wall time and
the processor time are printed: one that takes long and uses little waits for something.

``--record`` keeps the figures under ``benchmarks/results``. Do so on a machine that does nothing else.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

FOLDER_VARIABLE = "TEST_TIMES_FOLDER"
"""Names the folder that tests write their times to, one file for each process of pytest; unset, none does."""

Lane = tuple[str, ...]
STAGES: tuple[tuple[Lane, ...], ...] = (
    (("setup",),),
    (("lint", "types"), ("test-repo",)),
    (("test",),),
    (("test-timed",),),
    (("test-cluster",), ("test-hostile", "test-chaos", "bench-instructions")),
)
"""Stages follow each other. Their lanes run at the same time, and the parts of a lane one after the other."""


@dataclass(frozen=True)
class Part:
    """One target of the Makefile, run."""

    target: str
    exit_code: int
    wall_s: float
    cpu_s: float
    """Of all its processes that were waited for."""


@dataclass(frozen=True)
class TestTime:
    """What one test took, fixtures included."""

    test: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Result:
    """One run of the gate."""

    name: str
    measured_at: str
    commit: str
    cores: int
    load_average: tuple[float, float, float]
    """Of the machine when the run began."""

    wall_s: float
    parts: list[Part]
    slowest: list[TestTime]
    file_s: dict[str, float]
    """The wall time of each file of tests."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="gate", description="Run what a change must pass, with times.")
    parser.add_argument("--slowest", type=int, default=20, help="how many tests to print")
    parser.add_argument("--record", action="store_true", help="keep the figures under benchmarks/results")
    options = parser.parse_args(arguments)
    started, load_average = time.monotonic(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvrouter-gate-") as folder:
        parts = run_stages(STAGES, root=ROOT, times=Path(folder))
        tests = sorted(_test_times(Path(folder)), key=lambda each: each.wall_s, reverse=True)
    result = Result(
        name="gate",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        cores=os.cpu_count() or 1,
        load_average=load_average,
        wall_s=round(time.monotonic() - started, 1),
        parts=parts,
        slowest=tests[: options.slowest],
        file_s=file_seconds(tests),
    )
    print(report(result, latest_recorded()))
    passed = all(part.exit_code == 0 for part in parts)
    if options.record and passed:
        path = RESULTS / f"gate-{result.commit}.json"
        path.write_text(json.dumps(asdict(result), indent=2) + "\n")
        print(f"recorded in {path.relative_to(ROOT)}")
    return 0 if passed else 1


def run_stages(stages: Sequence[Sequence[Lane]], *, root: Path, times: Path) -> list[Part]:
    """Run targets of ``root``'s Makefile until a stage fails; tests write their times below ``times``."""
    parts: list[Part] = []
    for lanes in stages:
        ran: list[list[Part]] = [[] for _ in lanes]
        threads = [
            threading.Thread(target=_run_lane, args=(lane, len(lanes) > 1, root, times, done))
            for lane, done in zip(lanes, ran, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        parts += [part for done in ran for part in done]
        if any(part.exit_code for part in parts):
            break
    return parts


def _run_lane(lane: Lane, has_neighbours: bool, root: Path, times: Path, done: list[Part]) -> None:
    for target in lane:
        done.append(_run_part(target, has_neighbours, root, times / target))
        if done[-1].exit_code:
            return


def _run_part(target: str, has_neighbours: bool, root: Path, times: Path) -> Part:
    """Run one target. Where another runs beside it, the target's name begins each of its lines."""
    times.mkdir()
    started = time.monotonic()
    process = subprocess.Popen(
        ["make", "--no-print-directory", target],
        cwd=root,
        env={**os.environ, FOLDER_VARIABLE: str(times)},
        stdout=subprocess.PIPE if has_neighbours else None,
        stderr=subprocess.STDOUT if has_neighbours else None,
        text=True,
    )
    if process.stdout is not None:
        for line in process.stdout:
            print(f"{target:>12} | {line}", end="", flush=True)
        process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Part(
        target,
        process.returncode,
        round(time.monotonic() - started, 1),
        round(usage.ru_utime + usage.ru_stime, 1),
    )


def file_seconds(tests: Iterable[TestTime]) -> dict[str, float]:
    """The wall time of each file of tests, by its path."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for each in tests:
        seconds[each.test.partition("::")[0]] += each.wall_s
    return {path: round(seconds[path], 1) for path in sorted(seconds)}


def _test_times(times: Path) -> Iterator[TestTime]:
    for path in times.glob("*/*.jsonl"):
        for line in path.read_text().splitlines():
            yield TestTime(**json.loads(line))


def latest_recorded() -> dict[str, Any] | None:
    """The latest run that was recorded, as its file has it."""
    runs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in RESULTS.glob("gate-*.json")]
    return max(runs, key=lambda run: str(run["measured_at"]), default=None)


def report(result: Result, recorded: Mapping[str, Any] | None) -> str:
    """The table of parts, with what each took in the run that was recorded, and the slowest tests."""
    then_s = {} if recorded is None else {part["target"]: part["wall_s"] for part in recorded["parts"]}
    lines = ["", f"{'wall':>7} {'cpu':>7} {'before':>7}  part"]
    for part in result.parts:
        failed = "" if part.exit_code == 0 else f"  FAILED ({part.exit_code})"
        took = f"{_minutes(part.wall_s)} {_minutes(part.cpu_s)} {_minutes(then_s.get(part.target))}"
        lines.append(f"{took}  make {part.target}{failed}")
    cpu_s = sum(part.cpu_s for part in result.parts)
    all_then_s = None if recorded is None else recorded["wall_s"]
    lines.append(f"{_minutes(result.wall_s)} {_minutes(cpu_s)} {_minutes(all_then_s)}  all")
    if result.slowest:
        lines += ["", f"{'wall':>7} {'cpu':>7}  the slowest tests, in seconds"]
        lines += [f"{each.wall_s:7.1f} {each.cpu_s:7.1f}  {each.test}" for each in result.slowest]
    return "\n".join(lines)


def _minutes(seconds: float | None) -> str:
    return " " * 7 if seconds is None else f"{int(seconds) // 60:4}:{int(seconds) % 60:02}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
