"""Counting: windows of operations, less a window without any, so that marking it is not in the figure."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.frontend.client import wait_ready
from benchmarks.frontend.processes import environ_of
from benchmarks.instructions.instruments import (
    Counts,
    Instrument,
    pipe_lines,
)
from benchmarks.instructions.marks import Reply
from benchmarks.instructions.peer import Peer, SteppedEngine, serve_workers
from tests.testing.processes import free_ports

ROUNDS = 3
WARM_OPERATIONS = 12
QUIET_AFTER_S = 6.0
"""Timers that were set before they were put off come within this time, but for rare ones."""

RANKS = (16, 256, 1000)
COSTS = ("blocks", "time")
DECISIONS = 64
WORDS = (32, 2000)
REQUESTS = {32: 24, 2000: 8}
"""Requests of a window, by their words."""

MORE_TOKENS = 192

READY_WITHIN_S = 300.0
"""Under callgrind, on a machine that has other work."""

Window = Callable[[int], Awaitable[Counts]]


class Figure(NamedTuple):
    """What one operation costs, and how much more the next round said, as a part of it."""

    cost: float
    noise: float


Figures = dict[str, dict[str, Figure]]
"""By operation and by what was counted."""


class Counted:
    """The counted process, as the counting one sees it."""

    def __init__(self, instrument: Instrument, wire: socket.socket, said: Iterator[str]) -> None:
        self._instrument = instrument
        self._wire = wire
        self._lines = wire.makefile("r", encoding="utf-8")
        self._said = said

    def tell(self, message: bytes) -> tuple[Reply, Counts]:
        """Say something that ends with a mark; return what was counted since the mark before."""
        self._wire.sendall(message)
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the counted process ended")
        reply: Reply = json.loads(line)
        return reply, self._instrument.read(self._said, reply)

    @contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        """Count within the block: outside of it the process runs faster."""
        self._instrument.switch(pid, is_on=True)
        yield
        self._instrument.switch(pid, is_on=False)


@contextmanager
def counted(
    instrument: Instrument,
    folder: Path,
    environ: Mapping[str, str],
    module: str,
    *arguments: str,
    python: str = sys.executable,
) -> Iterator[Counted]:
    """Run ``module`` as the counted process until the block ends."""
    wire, theirs = socket.socketpair()
    with pipe_lines() as (write, said), wire:
        with theirs:
            process = subprocess.Popen(
                [
                    *instrument.command(folder, write),
                    *(python, "-m", module, str(theirs.fileno())),
                    *arguments,
                ],
                env={**environ, **instrument.environ(), "PYTHONHASHSEED": "0"},
                pass_fds=(theirs.fileno(), write),
                stdout=subprocess.DEVNULL,
                stderr=(folder / "stderr").open("wb"),
            )
        try:
            yield Counted(instrument, wire, said)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def count_decisions(
    make: Callable[[], Instrument], costs: Sequence[str] = COSTS, python: str = sys.executable
) -> Figures:
    """Count decisions with booking, by each cost, in processes of ``python``."""
    figures: Figures = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        counted(
            make(), Path(folder), os.environ, f"{__package__}.counted_decisions", python=python
        ) as process,
    ):

        async def window(n: int) -> Counts:
            return process.tell(json.dumps({"decide": n}).encode() + b"\n")[1]

        for n_ranks in RANKS:
            for cost in costs:
                prepare = {"prepare": n_ranks, "cost": cost}
                reply, _ = process.tell(json.dumps(prepare).encode() + b"\n")
                asyncio.run(window(DECISIONS))
                name = f"decision with booking, {n_ranks:,} ranks, cost of {cost}"
                with process.counting(reply["pid"]):
                    figures[name] = asyncio.run(_figures(window, DECISIONS))
    return figures


def count_requests(make: Callable[[], Instrument]) -> Figures:
    """Count requests, whole and streamed, and one more token of a stream."""
    return asyncio.run(_count_requests(make()))


async def _count_requests(instrument: Instrument) -> Figures:
    figures: Figures = {}
    async with _fleet(instrument) as (process, peer):

        async def window(n: int, *, words: int, tokens: int, stream: bool) -> Counts:
            process.tell(b"m")
            await peer.wait_idle()
            for _ in range(n):
                await peer.ask(words=words, tokens=tokens, stream=stream)
            return process.tell(b"m")[1]

        for words in WORDS:
            for _ in range(WARM_OPERATIONS):
                await peer.ask(words=words, tokens=1, stream=False)
                await peer.ask(words=words, tokens=4, stream=True)
        await asyncio.sleep(QUIET_AFTER_S)
        with process.counting(peer.pid):
            for words in WORDS:
                for stream in (False, True):

                    async def of_requests(n: int, words: int = words, *, stream: bool = stream) -> Counts:
                        return await window(n, words=words, tokens=1, stream=stream)

                    name = f"request, {words:,} words, {'streamed' if stream else 'whole'}"
                    figures[name] = await _figures(of_requests, REQUESTS[words])

            async def of_tokens(n: int) -> Counts:
                return await window(1, words=32, tokens=1 + n, stream=True)

            figures["one more streamed token"] = await _figures(of_tokens, MORE_TOKENS)
    return figures


@asynccontextmanager
async def _fleet(instrument: Instrument) -> AsyncIterator[tuple[Counted, Peer]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "fleet").mkdir(mode=0o700)
        engine = SteppedEngine()
        await serve_workers(stack, folder / "fleet", engine)
        port = free_ports(1)
        arguments = (f"{__package__}.counted_frontend", "frontend", "--http-port", str(port))
        process = stack.enter_context(counted(instrument, folder, environ_of(folder / "fleet"), *arguments))
        answering = asyncio.create_task(_answer(engine))
        await wait_ready(port, READY_WITHIN_S)
        answering.cancel()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        peer = Peer(reader, writer, engine)
        peer.pid = process.tell(b"q")[0]["pid"]
        yield process, peer


async def _answer(engine: SteppedEngine) -> None:
    """Let every request have its answer: the fleet is not yet counted."""
    while True:
        (await engine.streams.get()).bring(is_last=True)


async def _figures(window: Window, n: int) -> dict[str, Figure]:
    """Return what one operation costs: windows of n of them, less what a window without any takes."""
    await window(2)
    without = [await window(0) for _ in range(ROUNDS)]
    windows = [await window(n) for _ in range(ROUNDS)]
    return {
        what: _figure(sorted(each[what] for each in without), sorted(each[what] for each in windows), n)
        for what in without[0]
    }


def _figure(without: list[int], windows: list[int], n: int) -> Figure:
    """The least of each: what the process does by itself, such as a date each second, only adds."""
    cost = (windows[0] - without[0]) / n
    return Figure(cost, (windows[1] - windows[0]) / n / cost if cost else 0.0)
