"""``python -m benchmarks.refused_bodies``: how long others wait while a body of 59 MB is refused.

One frontend and one worker, processes of their own; twelve clients stream, and one asks ``/health`` every
20 ms, while a process next to them sends one body after the other. A wait is the slowest answer of
``/health``, or the longest time between two tokens of one stream, from the sending of a body until every
stream went on after its refusal. What the same clients wait for without any body stands in the last row. The
clients' own event loop has a line: where it stood still, a wait seems longer than it was. Their process
collects its garbage between two measurements, which takes it a tenth of a second.
"""

import asyncio
import gc
import http.client
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from typing import NamedTuple

import click

from benchmarks.report import open_console, report
from benchmarks.results import Line, measured
from benchmarks.turns import TurnClock
from tests.system.hostile.bodies import LONG_BODY_BYTES, RefusedBody, refused_bodies
from tests.system.hostile.bystanders import Bystanders
from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import Frontend, fleet

ROUNDS = 5
MS = 1000.0
NO_BODY = "no body"
NO_BODY_LOOKS = 8
NO_BODY_S = 0.5
"""About as long as a body takes to be sent and refused."""


@cache
def the_bodies() -> dict[str, RefusedBody]:
    """The bodies, once for each process."""
    return refused_bodies(LONG_BODY_BYTES)


def send(port: int, kind: str) -> int:
    """Send the body of this kind, in a process of its own; return the answer's status."""
    path, body, _ = the_bodies()[kind]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return answer.status


class Waits(NamedTuple):
    """The longest of one measurement, in seconds."""

    health_s: float
    stream_s: float
    clients_s: float
    """The longest turn of the clients' own event loop."""


WAITS = ("a wait of /health", "a wait of a stream", "a turn of the clients' event loop")


class Bench:
    """A frontend, and a process that sends it bodies."""

    def __init__(self, frontend: Frontend, sender: ProcessPoolExecutor, clock: TurnClock) -> None:
        port = frontend.http.base_url.port
        if port is None:
            raise ValueError("the frontend has no port")
        self._frontend = frontend
        self._port = port
        self._sender = sender
        self._clock = clock
        self._meter = Meter(frontend.pid)

    async def held_by(self, kind: str) -> float:
        """Send one body while nobody else is there: memory at its peak, in lengths of the body."""
        self._meter.forget_peak()
        before_bytes = self._meter.resident_bytes()
        await self._refuse(kind)
        return (self._meter.peak_bytes() - before_bytes) / len(the_bodies()[kind].body)

    async def companion(self, kind: str | None) -> Waits:
        """What the others wait for while a body of this kind is refused, or while nothing happens."""
        gc.collect()
        async with Bystanders(self._frontend) as others:
            others.start_over()
            await asyncio.sleep(0)
            self._clock.take_longest()
            await (asyncio.sleep(NO_BODY_S) if kind is None else self._refuse(kind))
            await others.passed()
            await asyncio.sleep(0)  # the turn that brought the last piece ends here, and counts
            return Waits(others.longest_health_s, others.longest_gap_s, self._clock.take_longest().clock_s)

    async def _refuse(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        status = await loop.run_in_executor(self._sender, send, self._port, kind)
        if status not in (400, 404):
            raise SystemExit(f"{kind}: it was answered {status}")


async def measure(note: Callable[[str], None], sender: ProcessPoolExecutor, clock: TurnClock) -> list[Line]:
    """Every kind of body, round after round."""
    kinds = list(the_bodies())
    waits: dict[str, list[list[Waits]]] = {kind: [] for kind in [*kinds, NO_BODY]}
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        bench = Bench(await here.frontend(), sender, clock)
        held = {}
        for kind in kinds:
            note(f"{kind}, alone")
            held[kind] = await bench.held_by(kind)
        for number in range(ROUNDS):
            note(f"round {number + 1} of {ROUNDS}: {NO_BODY}")
            waits[NO_BODY].append([await bench.companion(None) for _ in range(NO_BODY_LOOKS)])
            for kind in kinds:
                note(f"round {number + 1} of {ROUNDS}: {kind}")
                waits[kind].append([await bench.companion(kind)])
    lines = []
    for kind, rounds in waits.items():
        for pick, name in enumerate(WAITS):
            samples = [[MS * each[pick] for each in of_round] for of_round in rounds]
            lines.append(Line(kind, name, "ms", measured(samples)))
        if kind in held:
            lines.append(Line(kind, "memory at its peak", "bodies", measured([[held[kind]]])))
    return lines


@click.command()
def main() -> None:
    """Measure, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    clock = TurnClock()
    with (
        console.status("refused bodies") as status,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as sender,
        asyncio.Runner(loop_factory=clock.loop) as runner,
    ):
        gc.disable()
        lines = runner.run(measure(status.update, sender, clock))
    report("refused-bodies", lines, {"kvrouter": version("kvrouter")}, load_average, console, keep=True)


if __name__ == "__main__":
    main()
