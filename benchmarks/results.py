"""A result as data: the rows, with the commit, the machine and the versions that they were measured with."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.http_replay.machine import Commit, Machine, this_commit, this_machine
from benchmarks.measure import quantile

RESULTS = Path(__file__).parent / "results"


class Measured(msgspec.Struct, frozen=True):
    """One side's samples of one variant: quantiles over all, and the median of each round."""

    p50: float
    p99: float
    samples: int
    round_p50s: tuple[float, ...]


class Line(msgspec.Struct, frozen=True):
    """One line of the table. ``ratio`` is ours over theirs, of medians; lower is better in every unit."""

    row: str
    variant: str
    unit: str
    ours: Measured
    peer: str | None = None
    theirs: Measured | None = None
    ratio: float | None = None
    wanted_ratio: float | None = None


class Result(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    measured_at: str
    commit: Commit
    machine: Machine
    versions: dict[str, str]
    load_average: tuple[float, float, float]
    """Of the machine when the run began: above its cores, others were at work next to it."""

    lines: tuple[Line, ...]


def spread(figures: Sequence[float], form: str) -> str:
    """The median of several runs' figures, and the least and the greatest, each written in ``form``."""
    return f"{median(figures):{form}} ({min(figures):{form}}–{max(figures):{form}})"


def measured(rounds: list[list[float]]) -> Measured:
    """Sum up one side's rounds. Raises ValueError when there is no sample."""
    samples = [sample for each in rounds for sample in each]
    return Measured(
        p50=quantile(samples, 0.5),
        p99=quantile(samples, 0.99),
        samples=len(samples),
        round_p50s=tuple(quantile(each, 0.5) for each in rounds),
    )


def new_result(
    name: str, *, versions: dict[str, str], lines: Sequence[Line], load_average: tuple[float, float, float]
) -> Result:
    """Put a result together, now, on this machine, at this commit."""
    return Result(
        name=name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=this_commit(),
        machine=this_machine(),
        versions=dict(sorted(versions.items())),
        load_average=load_average,
        lines=tuple(lines),
    )


def write_result(result: Result, folder: Path = RESULTS) -> Path:
    """Write ``<name>-<commit>.json``, or ``<name>-<commit>-2.json`` for a second run; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{re.sub(r'[^a-z0-9-]', '-', result.name)}-{result.commit.id}"
    path, run = folder / f"{stem}.json", 1
    while path.exists():
        run += 1
        path = folder / f"{stem}-{run}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def read_result(path: Path) -> Result:
    """Read a result. Raises ``msgspec.ValidationError`` when the file is none."""
    return msgspec.json.decode(path.read_bytes(), type=Result)
