"""``python -m benchmarks.recording_cost``: the processor time of a frontend, recording and not recording.

One frontend and one mock worker, processes of their own. The frontend is started with `--record`, and a
switch of this benchmark's own (`benchmarks/recording_switch.py`) stops recording and goes on: one process is
compared with itself, as two differ by some percent for no reason that matters here.

A slice sends 160 new prompts, four at a time, and waits until what was recorded is written. Its figure is the
processor time of all threads of the frontend, user and system, over its prompts. Two slices follow each other
as a pair, one recording and one not, and pairs alternate in which comes first. Hundreds of short pairs are
narrow where a few long ones are not: a machine that others use changes its pace within seconds, and both
slices of a pair see the same of it. Pairs are of one kind of request after another in turn, and their
intervals are from resampling them. What the recorder's thread takes is read from its own clock, over the
requests that it wrote. Its looks while nothing comes are in that, and in both sides of each pair.
"""

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import msgspec

from benchmarks.frontend.client import prompt_of
from benchmarks.http_replay.machine import Commit, Machine, this_commit, this_machine
from benchmarks.recording_switch import RECORDER, TICK_S
from benchmarks.results import RESULTS
from benchmarks.streamed_tokens import Ratio
from kvrouter.sim.traces.read import open_trace
from tests.testing.mock_server import word_ids
from tests.testing.processes import Frontend, eventually, fleet

BLOCK_TOKENS = 16
PROMPTS = 160
"""In each slice."""

AT_ONCE = 4
SETTLE_S = 1.3 * TICK_S
"""Longer than the recorder leaves what it was given."""

WARM_SLICES = 4
RESAMPLES = 2_000
SEED = 1

_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Kind(NamedTuple):
    """One kind of request: what it is called, its path, and its number of tokens, asked and answered."""

    name: str
    path: str
    prompt_tokens: int
    answer_tokens: int


KINDS = (
    Kind("8,192 token ids, answers of 1 token", "/v1/completions", 8_192, 1),
    Kind("8,192 token ids, answers of 64 tokens", "/v1/completions", 8_192, 64),
    Kind("chat of 1,024 words, answers of 64 tokens", "/v1/chat/completions", 1_024, 64),
)
"""The first is what recording is dearest for: nothing is tokenized, and there are 512 blocks to name."""


class RecordingCost(msgspec.Struct, frozen=True):
    """Requests of one kind. Figures are microseconds of processor time a request; pairs are in order."""

    requests: str
    records: tuple[float, ...]
    plain: tuple[float, ...]
    thread_us: float
    """What the recorder's own thread took for a request that it wrote."""
    ratio: Ratio
    """Recording against not."""
    noise: Ratio
    """Not recording against not recording: of each pair with an odd number against the one before it."""


class RecordingCosts(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    measured_at: str
    commit: Commit
    machine: Machine
    load_average: tuple[float, float, float]
    block_tokens: int
    prompts_a_slice: int
    costs: tuple[RecordingCost, ...]


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Load:
    """Sends prompts that nobody sent before."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._n_sent = 0

    async def send(self, kind: Kind) -> None:
        """Send a slice's prompts; some are under way at once."""
        requests = [self._request(kind) for _ in range(PROMPTS)]
        await asyncio.gather(
            *(_ask(each, requests[number::AT_ONCE]) for number, each in enumerate(self._connections))
        )

    def _request(self, kind: Kind) -> bytes:
        self._n_sent += 1
        asked = {
            "model": "mock",
            "max_tokens": kind.answer_tokens,
            "stream": True,
            **self._prompt(kind),
        }
        body = msgspec.json.encode(asked)
        return (
            b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (kind.path.encode(), len(body))
        ) + body

    def _prompt(self, kind: Kind) -> dict[str, object]:
        # blocks are named with all before them, so a beginning of their own makes every block a new one
        if kind.path == "/v1/chat/completions":
            text = prompt_of(self._n_sent, kind.prompt_tokens)
            return {"messages": [{"role": "user", "content": text}]}
        own = word_ids(first=self._n_sent, n=1) + word_ids(first=self._n_sent // 90, n=1)
        return {"prompt": own + word_ids(n=kind.prompt_tokens - 2)}


async def _ask(connection: Connection, requests: Sequence[bytes]) -> None:
    reader, writer = connection
    for request in requests:
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"it was answered {answer.decode(errors='replace')}")
        tail = b""
        while not tail.endswith(_END):
            data = await reader.read(65536)
            if not data:
                raise SystemExit("a stream ended early")
            tail = (tail + data)[-len(_END) :]


def used_us(pid: int) -> float:
    """Return the processor time that a process has used, all of its threads, in microseconds."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e3  # as clock_getcpuclockid(3) has it on Linux


def recorder_us(pid: int) -> float:
    """Return the processor time that the recorder's thread has used, in microseconds."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == RECORDER:
            return int((task / "schedstat").read_text().split()[0]) / 1e3
    raise SystemExit("the frontend has no recorder")


class Bench:
    """The frontend, whether it records now, and what its slices took."""

    def __init__(self, frontend: Frontend, load: Load) -> None:
        self._frontend = frontend
        self._load = load
        self._records = True
        self.n_recorded = 0
        self.thread_us = dict.fromkeys(KINDS, 0.0)
        self.slices_us: dict[tuple[Kind, bool], list[float]] = {
            (kind, records): [] for kind in KINDS for records in (True, False)
        }

    async def warm(self) -> None:
        """Send what is not measured."""
        for kind in KINDS:
            for _ in range(WARM_SLICES):
                await self._slice(kind)
                self._switch()

    async def pair(self, kind: Kind, *, records_first: bool) -> tuple[float, float]:
        """Measure two slices; return the one that was recorded, and the other."""
        for records in (records_first, not records_first):
            if records != self._records:
                self._switch()
            began_us = recorder_us(self._frontend.pid)
            took_us = await self._slice(kind)
            if self._records:
                self.thread_us[kind] += recorder_us(self._frontend.pid) - began_us
            self.slices_us[kind, self._records].append(took_us)
        return self.slices_us[kind, True][-1], self.slices_us[kind, False][-1]

    def _switch(self) -> None:
        self._frontend.process.send_signal(signal.SIGUSR1)
        self._records = not self._records

    async def _slice(self, kind: Kind) -> float:
        began_us = used_us(self._frontend.pid)
        await self._load.send(kind)
        await asyncio.sleep(SETTLE_S)
        self.n_recorded += PROMPTS if self._records else 0
        return (used_us(self._frontend.pid) - began_us) / PROMPTS


async def measure(n_pairs: int, note: Callable[[str], None]) -> list[RecordingCost]:
    """Measure pairs of every kind, in turn."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-recording-") as folder:
        async with fleet({}) as here:
            await here.worker(
                *("--model", "mock", "--block-size", str(BLOCK_TOKENS), "--context-length", "16384"),
                *("--total-kv-blocks", "65536", "--speedup", "1000"),
            )
            frontend = await here.frontend("--record", folder, module="benchmarks.recording_switch")
            await eventually(lambda: frontend.serves(1))
            port = int(frontend.ready["port"])
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(AT_ONCE)]
            bench = Bench(frontend, Load(connections))
            await bench.warm()
            for number in range(n_pairs):
                for kind in KINDS:
                    records, plain = await bench.pair(kind, records_first=number % 2 == 0)
                    note(f"{number + 1} of {n_pairs}: {kind.name}: {records:.0f} µs, without {plain:.0f} µs")
            for _, writer in connections:
                writer.close()
            await frontend.stop()
        n_recorded = await asyncio.to_thread(_n_recorded, Path(folder))
        if n_recorded != bench.n_recorded:
            raise SystemExit(f"{n_recorded} requests are recorded of {bench.n_recorded}")
    return [_cost(bench, kind) for kind in KINDS]


def _n_recorded(folder: Path) -> int:
    return sum(1 for _ in open_trace(folder))


def _cost(bench: Bench, kind: Kind) -> RecordingCost:
    records, plain = bench.slices_us[kind, True], bench.slices_us[kind, False]
    n_whole = len(plain) // 2 * 2
    return RecordingCost(
        requests=kind.name,
        records=tuple(records),
        plain=tuple(plain),
        thread_us=bench.thread_us[kind] / (len(records) * PROMPTS),
        ratio=resampled_ratio(records, plain),
        noise=resampled_ratio(plain[1:n_whole:2], plain[:n_whole:2]),
    )


def resampled_ratio(new: Sequence[float], old: Sequence[float]) -> Ratio:
    """Return the ratio of the sums of pairs, with the interval that 95 % of their resamples lie in."""
    pairs = list(zip(new, old, strict=True))
    draw = random.Random(SEED).choices
    ratios = sorted(_ratio(draw(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    edge = RESAMPLES // 40
    return Ratio(_ratio(pairs), ratios[edge], ratios[-edge - 1])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(new for new, _ in pairs) / sum(old for _, old in pairs)


def show(costs: Sequence[RecordingCost]) -> None:
    """Print the ratios."""
    for cost in costs:
        print(f"{cost.requests}: {median(cost.plain):.0f} µs a request without recording, the median")
        for name, ratio in (("recording", cost.ratio), ("noise", cost.noise)):
            print(
                f"  {name}: {100 * (ratio.mean - 1):+.2f} % "
                f"({100 * (ratio.low - 1):+.2f} to {100 * (ratio.high - 1):+.2f})"
            )
        print(f"  the recorder's thread: {cost.thread_us:.0f} µs a request")


@click.command()
@click.option("--pairs", type=click.IntRange(min=4), default=120, show_default=True)
@click.option("--keep", is_flag=True, help="Write the result to benchmarks/results.")
def main(pairs: int, *, keep: bool) -> None:
    """Measure, print the ratios, and write the result file where that is asked for."""
    load_average = os.getloadavg()
    costs = asyncio.run(measure(pairs, lambda line: print(line, flush=True)))
    show(costs)
    if not keep:
        return
    commit = this_commit()
    result = RecordingCosts(
        name="recording-cost",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=this_machine(),
        load_average=load_average,
        block_tokens=BLOCK_TOKENS,
        prompts_a_slice=PROMPTS,
        costs=tuple(costs),
    )
    path = RESULTS / f"recording-cost-{commit.id}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    print(path)


if __name__ == "__main__":
    main()
