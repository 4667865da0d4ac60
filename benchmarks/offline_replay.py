"""``make bench-replay``: our replay of a whole trace and Dynamo's own offline replay, in one run.

Each side is a process of its own, from the file to the figures, and its CPU is what the kernel counted for it
(user and system). The sides take turns. Both have blocks of 512 tokens, 4,096 blocks a worker, their default
timing, and a router that knows the caches. KV takes no time on its way, which is Dynamo's default. What both
say of reuse and TTFT stands in the result too.

Then our own replay alone: at small blocks over that at 512; what a request costs without its decision, over
1,000 workers instead of 8 at the same load for each; and a million requests over 1,000 workers.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import click

from benchmarks.peers.environment import ensure_environment
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured
from benchmarks.sides import ROOT

TRACE = ROOT / "data" / "mooncake-conversation.jsonl.gz"
ROUNDS = 5
WANTED = 1.0
CHILDREN_OF_BLOCK = (64, 16)
"""Our own block sizes that are compared with our time at 512; the memory of a worker is the same."""

FLEETS = (8, 1000)
FLEET_REQUESTS = 20_000
MILLION = 1_000_000

BLOCK = 512
BLOCKS = 4096
NO_TIME = "{latency_s: 0, bandwidth_bytes_per_s: 1.0e+15}"
SHAPES = {
    "8 aggregated": ("aggregated", 8),
    "4 prefill + 4 decode": ("disaggregated", 4),
}

Figures = dict[str, float]


def fleet_text(shape: str, workers: int, block: int) -> str:
    """A fleet file; every worker has as many tokens of KV at any block size."""
    engine = f"engine: {{total_kv_blocks: {BLOCKS * BLOCK // block}}}"
    groups = (
        [f"{{name: a, replicas: {workers}, {engine}}}"]
        if shape == "aggregated"
        else [
            f"{{name: {role}, role: {role}, replicas: {workers}, {engine}}}" for role in ("prefill", "decode")
        ]
    )
    return (
        f"version: 1\nmodels: [{{name: m, block_size: {block}, context_length: 1000000}}]\n"
        f"topology: {{levels: [zone], links: {{across: {NO_TIME}}}}}\n"
        f"workers: [{', '.join(groups)}]\n"
    )


def cpu_of(command: Sequence[str], env: dict[str, str] | None = None) -> float:
    """Run a process; return the seconds of CPU that it took. Raises SystemExit with what it said."""
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Ours:
    """Our command, with a fleet file and a place for its figures."""

    def __init__(self, folder: Path, trace: Path) -> None:
        self._folder = folder
        self._trace = trace

    def run(self, shape: str, workers: int, block: int = BLOCK) -> float:
        """Replay; return the seconds of CPU."""
        fleet = self._folder / "fleet.yaml"
        fleet.write_text(fleet_text(shape, workers, block), encoding="utf-8")
        command = str(Path(sys.executable).with_name("kvrouter"))
        given = ["--fleet", str(fleet), "--output", f"json={self._figures}"]
        return cpu_of([command, "replay", str(self._trace), *given])

    def figures(self) -> Figures:
        """What the last run said."""
        row = json.loads(self._figures.read_text(encoding="utf-8"))["variants"][0]["summaries"][0]
        return {
            "reuse": row["cached_share"],
            "TTFT mean": row["ttft_ms"]["mean"],
            "TTFT p99": row["ttft_ms"]["p99"],
            "ITL mean": row["itl_ms"]["mean"],
        }

    @property
    def _figures(self) -> Path:
        return self._folder / "ours.json"


class Dynamo:
    """Dynamo's offline replay, in the peers' environment."""

    def __init__(self, python: Path, folder: Path, trace: Path) -> None:
        self._python = python
        self._figures = folder / "dynamo.json"
        self._trace = trace

    def run(self, shape: str, workers: int) -> float:
        """Replay; return the seconds of CPU."""
        return cpu_of(
            [str(self._python), "-m", "benchmarks.peers.dynamo.replay", str(self._trace),
             shape, str(workers), str(BLOCK), str(BLOCKS), str(self._figures)],
            env={**os.environ, "DYN_LOG": "error"},
        )  # fmt: skip

    def figures(self) -> Figures:
        """What the last run said."""
        row = json.loads(self._figures.read_text(encoding="utf-8"))
        return {
            "reuse": row["prefix_cache_reused_ratio"],
            "TTFT mean": row["mean_ttft_ms"],
            "TTFT p99": row["p99_ttft_ms"],
            "ITL mean": row["mean_tpot_ms"],
        }


def compare(ours: Ours, dynamo: Dynamo, rounds: int, tell: Callable[[str], None]) -> list[Line]:
    """Both sides in turn, for both shapes of fleet."""
    lines: list[Line] = []
    for name, (shape, workers) in SHAPES.items():
        mine: list[list[float]] = []
        theirs: list[list[float]] = []
        for number in range(rounds):
            tell(f"{name}: round {number + 1} of {rounds}")
            mine.append([ours.run(shape, workers)])
            theirs.append([dynamo.run(shape, workers)])
        lines.append(line(f"replay, {name}", "CPU", "s", mine, theirs, wanted=WANTED))
        seen, said = ours.figures(), dynamo.figures()
        lines += [
            line(f"replay, {name}", figure, "share" if figure == "reuse" else "ms", [[seen[figure]]],
                 [[said[figure]]])
            for figure in seen
        ]  # fmt: skip
    return lines


def line(
    row: str,
    variant: str,
    unit: str,
    mine: list[list[float]],
    theirs: list[list[float]],
    *,
    peer: str = "dynamo",
    wanted: float | None = None,
) -> Line:
    """A line with its ratio."""
    ours, peers = measured(mine), measured(theirs)
    ratio = ours.p50 / peers.p50 if peers.p50 else None
    return Line(row, variant, unit, ours, peer, peers, ratio, wanted)


def small_blocks(ours: Ours, rounds: int, tell: Callable[[str], None]) -> list[Line]:
    """Our own time at small blocks over that at 512."""
    times: dict[int, list[list[float]]] = {block: [] for block in (BLOCK, *CHILDREN_OF_BLOCK)}
    for number in range(rounds):
        for block, samples in times.items():
            tell(f"blocks of {block}: round {number + 1} of {rounds}")
            samples.append([ours.run("aggregated", 8, block)])
    return [
        line(f"replay, blocks of {block}", "CPU", "s", times[block], times[BLOCK],
             peer=f"ours at {BLOCK}", wanted=2.0)
        for block in CHILDREN_OF_BLOCK
    ]  # fmt: skip


def scaled(folder: Path, workers: int, requests: int) -> Figures:
    """What ``benchmarks.replay_scale`` says, in a process of its own."""
    figures = folder / "scale.json"
    cpu_of([sys.executable, "-m", "benchmarks.replay_scale", str(workers), str(requests), str(figures)])
    said: Figures = json.loads(figures.read_text(encoding="utf-8"))
    return said


def large_fleets(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[Line]:
    """What a request costs over many workers, without its decision and with it."""
    small, large = FLEETS
    alone: dict[int, list[list[float]]] = {small: [], large: []}
    whole: dict[int, list[list[float]]] = {small: [], large: []}
    for number in range(rounds):
        for workers in FLEETS:
            tell(f"{workers} workers: round {number + 1} of {rounds}")
            said = scaled(folder, workers, FLEET_REQUESTS)
            alone[workers].append([(said["cpu_s"] - said["decisions_s"]) / said["requests"] * 1e6])
            whole[workers].append([said["cpu_s"] / said["requests"] * 1e6])
    row, peer = f"replay, {large:,} workers, CPU a request", f"ours over {small}"
    return [
        line(row, "without its decision", "µs", alone[large], alone[small], peer=peer, wanted=1.2),
        line(row, "with it", "µs", whole[large], whole[small], peer=peer),
    ]


def million(folder: Path, tell: Callable[[str], None]) -> list[Line]:
    """A million requests, once."""
    workers = FLEETS[-1]
    tell(f"{MILLION:,} requests over {workers:,} workers: minutes")
    said = scaled(folder, workers, MILLION)
    row = f"replay, {MILLION:,} requests over {workers:,} workers"
    return [
        Line(row, "CPU", "s", measured([[said["cpu_s"]]])),
        Line(row, "wall", "s", measured([[said["wall_s"]]])),
        Line(row, "memory", "MB", measured([[said["bytes_max"] / 1e6]])),
    ]


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True), default=TRACE, help="Mooncake rows.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True)
@click.option(
    "--only", type=click.Choice(["dynamo", "blocks", "fleets", "million"]), help="One part; writes no file."
)
def main(trace: Path, rounds: int, only: str | None) -> None:
    """Measure, print the table, and write the result file."""
    console = open_console()
    load_average = os.getloadavg()
    lines: list[Line] = []
    versions = {"kvrouter": version("kvrouter")}
    with tempfile.TemporaryDirectory() as made, console.status("replay") as status:
        folder = Path(made)
        plain = folder / "trace.jsonl"
        with (
            gzip.open(trace) if trace.suffix == ".gz" else trace.open("rb") as packed,
            plain.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out)
        ours = Ours(folder, plain)
        if only in {None, "dynamo"}:
            python = ensure_environment()
            command = [
                str(python),
                "-c",
                "from importlib.metadata import version; print(version('ai-dynamo'))",
            ]
            told = subprocess.run(command, check=True, capture_output=True, text=True)
            versions["ai-dynamo"] = told.stdout.strip()
            lines += compare(ours, Dynamo(python, folder, plain), rounds, status.update)
        if only in {None, "blocks"}:
            lines += small_blocks(ours, rounds, status.update)
        if only in {None, "fleets"}:
            lines += large_fleets(folder, rounds, status.update)
        if only in {None, "million"}:
            lines += million(folder, status.update)
    report("offline-replay", lines, versions, load_average, console, keep=only is None)


if __name__ == "__main__":
    main()
