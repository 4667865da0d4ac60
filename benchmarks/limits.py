"""``make bench-limits``: how much one router takes: events, requests, and workers that it follows.

What a core of CPU takes follows from the CPU a batch and a request. What is taken by the clock is less: the
workers and clients share the machine.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import click

from benchmarks.event_lanes import LANES, RANKS, SHAPES, nats_server
from benchmarks.event_lanes import measure as measure_events
from benchmarks.frontend.client import ask_side_by_side, wait_ready
from benchmarks.frontend.processes import Server, module, our_frontend
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured

ROUNDS = 3
SECOND_US = 1e6
CONNECTIONS = 16
REQUESTS = {32: 60, 2000: 12}
"""Words of a prompt → requests a round over each connection."""

TICK_S = 0.02
FLEETS = ((200, 1), (200, 8))
"""Workers, each of a process of its own to the router, and the data-parallel ranks of each."""

JOINED_WITHIN_S = 120.0
SETTLED_S = 5.0
IDLE_S = 6.0


def main_lines(parts: frozenset[str], tell: Callable[[str], None]) -> list[Line]:
    """Measure what is asked for."""
    lines: list[Line] = []
    if "events" in parts:
        lines += events(tell)
    if "requests" in parts:
        tell("requests")
        lines += requests()
    if "workers" in parts:
        tell("workers")
        lines += workers()
    return lines


def events(tell: Callable[[str], None]) -> list[Line]:
    """What one router takes of each transport's events, from 64 ranks, as fast as it takes them."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as store, nats_server("-js", "-sd", store) as url:
        for lane in LANES:
            for n_blocks in SHAPES:
                tell(f"{lane}, {n_blocks} blocks")
                rounds = [measure_events(lane, url, n_blocks) for _ in range(ROUNDS)]
                row = (
                    f"events, {lane}, {n_blocks} blocks stored and {n_blocks} removed a batch, {RANKS} ranks"
                )
                figures = {
                    "CPU a batch|µs": [cpu_us for cpu_us, _ in rounds],
                    "a core of CPU takes|batches/s": [SECOND_US / cpu_us for cpu_us, _ in rounds],
                    "a core of CPU takes|blocks/s": [
                        2 * n_blocks * SECOND_US / cpu_us for cpu_us, _ in rounds
                    ],
                    "taken here|batches/s": [SECOND_US / clock_us for _, clock_us in rounds],
                    "of a core, here|CPU share": [cpu_us / clock_us for cpu_us, clock_us in rounds],
                }
                lines += lines_of(row, figures)
    return lines


def requests() -> list[Line]:
    """What one frontend takes of requests for one token, from clients that ask again at once."""
    lines: list[Line] = []
    with ExitStack() as stack:
        server = start_frontend(stack, n_workers=2, dp_size=1, processes=2)
        asyncio.run(wait_ready(server.port))
        for words, each in REQUESTS.items():
            rates, cpus_us, shares = [], [], []
            for number in range(ROUNDS + 1):
                before_us, began_s = server.cpu_us(), time.perf_counter()
                seed = 1_000_000 * words + number * CONNECTIONS * each
                rate = asyncio.run(
                    ask_side_by_side(
                        server.port, connections=CONNECTIONS, requests=each, prompt_words=words, seed=seed
                    )
                )
                if number:  # the first one warms up
                    used_us = server.cpu_us() - before_us
                    rates.append(rate)
                    cpus_us.append(used_us / (CONNECTIONS * each))
                    shares.append(used_us / SECOND_US / (time.perf_counter() - began_s))
            figures = {
                "CPU a request|µs": cpus_us,
                "a core of CPU takes|requests/s": [SECOND_US / cpu_us for cpu_us in cpus_us],
                "taken here|requests/s": rates,
                "of a core, here|CPU share": shares,
            }
            lines += lines_of(f"requests, {words:,} words, {CONNECTIONS} clients", figures)
    return lines


def workers() -> list[Line]:
    """What a worker that is only followed costs: memory, and CPU while nothing happens."""
    with ExitStack() as stack:
        alone = start_frontend(stack, n_workers=1, dp_size=1, processes=1)  # a model takes memory too
        wait_joined(alone, 1)
        time.sleep(SETTLED_S)
        alone_bytes, alone_us = alone.rss_bytes(), alone.watch_idle(IDLE_S)
        alone_files = open_files(alone)
    held = []
    lines = [
        *lines_of("1 worker followed", {"memory|MiB": [alone_bytes / 2**20], "idle CPU|µs/s": [alone_us]}),
    ]
    for n_workers, dp_size in FLEETS:
        with ExitStack() as stack:
            server = start_frontend(stack, n_workers=n_workers, dp_size=dp_size, processes=1)
            wait_joined(server, n_workers)
            time.sleep(SETTLED_S)
            held.append(server.rss_bytes() - alone_bytes)
            idle_us = server.watch_idle(IDLE_S) - alone_us
            files = open_files(server) - alone_files
        n_more = n_workers - 1
        figures = {
            "memory a worker|KiB": [held[-1] / n_more / 1024],
            "idle CPU a worker|µs/s": [idle_us / n_more],
            "open files a worker|files": [files / n_more],
        }
        lines += lines_of(f"{n_workers} workers followed, {dp_size} ranks each, zmq and tcp", figures)
    (n_workers, few), (_, many) = FLEETS
    a_rank = (held[1] - held[0]) / (n_workers * (many - few)) / 1024
    return [*lines, *lines_of("one more rank of a worker", {"memory a rank|KiB": [a_rank]})]


def start_frontend(stack: ExitStack, *, n_workers: int, dp_size: int, processes: int) -> Server:
    """Start a frontend, after workers that are spread over so many processes."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-bench-")))
    folder.chmod(0o700)
    for number in range(processes):
        each = n_workers // processes
        arguments = (str(TICK_S), str(number * each), str(folder), str(each), str(dp_size))
        stack.enter_context(module("benchmarks.frontend.worker", *arguments))
    return stack.enter_context(our_frontend(Path(sys.executable), folder))


def open_files(server: Server) -> int:
    """Return how many files the server has open."""
    return len(tuple(Path(f"/proc/{server.pid}/fd").iterdir()))


def wait_joined(server: Server, n_workers: int) -> None:
    """Return once the router follows so many workers. Raises TimeoutError."""
    until_s = time.monotonic() + JOINED_WITHIN_S
    joined = 0
    while time.monotonic() < until_s:
        with urlopen(f"http://127.0.0.1:{server.port}/v1/fleet", timeout=30.0) as answer:
            joined = sum(model["workers"] for model in json.load(answer)["models"])
        if joined == n_workers:
            return
        time.sleep(0.5)
    raise TimeoutError(f"{joined} of {n_workers} workers are followed after {JOINED_WITHIN_S:g} s")


def lines_of(row: str, figures: dict[str, list[float]]) -> list[Line]:
    """Return a line for each figure, which is named ``variant|unit``."""
    lines = []
    for name, values in figures.items():
        variant, _, unit = name.partition("|")
        lines.append(Line(row, variant, unit, measured([[value] for value in values])))
    return lines


@click.command()
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(("events", "requests", "workers")),
    help="Only this part; write no file.",
)
def main(parts: tuple[str, ...]) -> None:
    """Measure, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    with console.status("limits") as status:
        lines = main_lines(frozenset(parts or ("events", "requests", "workers")), status.update)
    versions = {name: version(name) for name in ("kvrouter", "nats-py", "pyzmq")}
    report("limits", lines, versions, load_average, console, keep=not parts)


if __name__ == "__main__":
    main()
