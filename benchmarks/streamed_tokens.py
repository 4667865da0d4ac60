"""Processor time of one streamed token over tcp, from the worker's engine to the router's reader.

    python -m benchmarks.streamed_tokens one
    python -m benchmarks.streamed_tokens --streams 1 pairs --old /path/to/another/checkout/src --runs 20

``one`` prints the microseconds of processor time a token of the kvrouter that it imports. ``pairs`` runs the
kvrouter of this checkout and that of ``--old`` in turn, in a process each, and writes the ratio new/old with
its 95 % interval to ``benchmarks/results``. A pair's order alternates, so that a machine that drifts favours
neither.
"""

import argparse
import asyncio
import math
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import msgspec
import uvloop

from benchmarks.http_replay.machine import Commit, Machine, this_commit, this_machine
from kvrouter.core.ids import Epoch, ModelName, RequestId, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport

RESULTS = Path(__file__).parent / "results"
STREAMS = 32
"""Of as many streams a frame carries a token each; with one stream every token is a frame and a write."""

TOKENS = 512_000
"""Over all streams; a sixteenth of them where there is one stream only."""

TOKEN = "a shared secret"


class Engine:
    """A worker whose every stream brings a token in each turn of the loop."""

    async def submit(self, request: EngineRequest) -> "Answer":
        """Take a leg."""
        return Answer(request.sampling.max_tokens or 0)


class Answer:
    """``n_tokens`` chunks of one token each, then an end."""

    def __init__(self, n_tokens: int) -> None:
        self._left = n_tokens

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> EngineChunk:
        await asyncio.sleep(0)
        self._left -= 1
        return EngineChunk((self._left,)) if self._left >= 0 else EngineChunk(finish=FinishReason.STOP)

    def cancel(self, _reason: str) -> None:
        """Bring no more."""
        self._left = 0


async def _read(plane: TcpRequestTransport, address: str, number: int, n_tokens_wanted: int) -> int:
    request = EngineRequest(
        request_id=RequestId(str(number)),
        attempt=0,
        leg=Leg.AGGREGATED,
        model=ModelName("m"),
        token_ids=array("I", [1, 2, 3]),
        sampling=Sampling(max_tokens=n_tokens_wanted),
        time_left_s=600.0,
    )
    stream = await plane.open(address, request)
    n_tokens = 0

    def take(token_ids: Sequence[int]) -> bool:
        nonlocal n_tokens
        n_tokens += len(token_ids)
        return True

    while True:
        await stream.hand_over(take)
        chunk = await anext(stream)
        n_tokens += len(chunk.token_ids)
        if chunk.finish is not None:
            return n_tokens


def tokens_a_stream(n_streams: int) -> int:
    """How many tokens each stream brings."""
    return TOKENS // max(n_streams, 16)


async def microseconds_a_token(n_streams: int) -> float:
    """Processor time of both ends, in one process."""
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await acceptor.start()
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    acceptor.serve(address, Engine())
    plane = TcpRequestTransport(token=TOKEN)
    began_s = time.process_time()
    each = tokens_a_stream(n_streams)
    read = await asyncio.gather(*(_read(plane, address, number, each) for number in range(n_streams)))
    took_s = time.process_time() - began_s
    await plane.close()
    await acceptor.close()
    if sum(read) != n_streams * each:
        raise RuntimeError(f"{sum(read)} tokens of {n_streams * each} came")
    return took_s / (n_streams * each) * 1e6


class Ratio(msgspec.Struct, frozen=True):
    """The geometric mean of paired ratios, and its 95 % interval."""

    mean: float
    low: float
    high: float


class StreamedTokens(msgspec.Struct, frozen=True):
    """One run of pairs. Figures are microseconds of processor time a token."""

    name: str
    measured_at: str
    commit: Commit
    old_commit: str
    machine: Machine
    load_average: tuple[float, float, float]
    streams: int
    tokens_a_stream: int
    new: tuple[float, ...]
    old: tuple[float, ...]
    ratio: Ratio


def ratio_of(new: Sequence[float], old: Sequence[float]) -> Ratio:
    """Return the paired ratio; the interval is Student's, which the normal quantile is corrected to."""
    logs = [math.log(a / b) for a, b in zip(new, old, strict=True)]
    z = NormalDist().inv_cdf(0.975)
    free = len(logs) - 1
    quantile = z + (z**3 + z) / (4 * free)  # the first term of Cornish and Fisher's expansion
    half = quantile * stdev(logs) / math.sqrt(len(logs))
    mean = fmean(logs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _measure(source: Path, n_streams: int) -> float:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.streamed_tokens", f"--streams={n_streams}", "one"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{source}:{root}"},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def _pairs(old_source: Path, n_runs: int, n_streams: int, *, is_kept: bool) -> None:
    new_source = Path(__file__).parent.parent / "src"
    load = os.getloadavg()
    new: list[float] = []
    old: list[float] = []
    for run in range(n_runs):
        sides = [(new_source, new), (old_source, old)]
        for source, figures in sides if run % 2 else reversed(sides):
            figures.append(_measure(source, n_streams))
        print(f"{new[-1]:.3f} µs a token, {old[-1]:.3f} before: {new[-1] / old[-1]:.4f}", flush=True)
    ratio = ratio_of(new, old)
    print(f"ratio {ratio.mean:.4f}, 95 % interval {ratio.low:.4f} to {ratio.high:.4f}")
    if not is_kept:
        return
    commit = this_commit()
    old_commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=old_source, check=True, capture_output=True, text=True
    ).stdout.strip()
    result = StreamedTokens(
        name="streamed-tokens",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        old_commit=old_commit,
        machine=this_machine(),
        load_average=load,
        streams=n_streams,
        tokens_a_stream=tokens_a_stream(n_streams),
        new=tuple(new),
        old=tuple(old),
        ratio=ratio,
    )
    path = RESULTS / f"streamed-tokens-of-{n_streams}-{commit.id}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    print(path)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="processor time of a streamed token over tcp")
    parser.add_argument("--streams", type=int, default=STREAMS)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("one", help="the kvrouter that is imported, once")
    pairs = what.add_parser("pairs", help="this checkout and another one, in turn")
    pairs.add_argument("--old", type=Path, required=True, help="the src folder of the other checkout")
    pairs.add_argument("--runs", type=int, default=20)
    pairs.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    given = parser.parse_args()
    if given.what == "one":
        print(uvloop.run(microseconds_a_token(given.streams)))
    else:
        _pairs(given.old, given.runs, given.streams, is_kept=given.keep)


if __name__ == "__main__":
    main()
