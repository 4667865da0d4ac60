"""``python -m benchmarks.herd_processes``: several real frontends before one fleet, open loop.

Eight ``kvrouter worker mock``, four ``kvrouter frontend`` without replica sync and four with it, over a real
nats-server, run side by side; one client sends the same arrivals to one, two or four of them in turn. A
worker's load is what the worker itself reports.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click
import uvloop

from benchmarks.event_lanes import nats_server
from benchmarks.frontend.client import wait_ready
from benchmarks.frontend.processes import Server, our_frontend
from benchmarks.herd import lines_of
from benchmarks.herd_client import requests_of, send
from benchmarks.herd_fleet import Outcome
from benchmarks.herd_load import Load
from benchmarks.herd_workers import N_WORKERS, Loads, loads_of, mock_workers
from benchmarks.http_replay.fleet import fetch
from benchmarks.limits import wait_joined
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured

SEEDS = (1, 2, 3)
SAMPLE_S = 0.1
"""As often as workers report their load."""

LOAD = Load("processes", rate=200.0, isl_tokens=200, osl_tokens=10, lasts_s=10.0, warm_s=2.0)

HEARD_WITHIN_S = 30.0

SHARE_UNIT = "share of a core"
LATE_UNIT = "ms late"


class Variant(NamedTuple):
    """How many frontends serve, and whether they tell each other."""

    n_frontends: int
    syncs: bool

    @property
    def name(self) -> str:
        if self.n_frontends == 1:
            return "1 router"
        return f"{self.n_frontends} routers, {'with' if self.syncs else 'without'} sync"


ONE = Variant(1, syncs=False)
VARIANTS = (ONE, *(Variant(n, syncs=syncs) for n in (2, 4) for syncs in (False, True)))


class Shown(NamedTuple):
    """What one run showed: of the fleet, and of whether the machine was quick enough for it."""

    outcome: Outcome
    late_ms: list[float]
    router_share: float
    """Of a core, that the busiest frontend used."""

    client_share: float


async def run(load: Load, serving: Sequence[Server], loads: Loads, *, seed: int, prompts: int) -> Shown:
    """Send the load of the seed, with prompts that nobody has seen, and sample what the workers report."""
    arrivals = load.arrivals(seed)
    requests = requests_of(arrivals, seed=prompts)
    ports = [frontend.port for frontend in serving]
    sending = asyncio.create_task(send(arrivals, requests, ports, warm_s=load.warm_s))
    await asyncio.sleep(load.warm_s)
    clocks = [_share_clock(frontend.cpu_us) for frontend in serving]
    client = _share_clock(_own_us)
    ratios = []
    until_s = time.monotonic() + arrivals[-1].at_s - load.warm_s
    while time.monotonic() < until_s:
        blocks = loads.blocks()
        if any(blocks):
            ratios.append(busiest_over_mean(blocks))
        await asyncio.sleep(SAMPLE_S)
    router_share, client_share = max(clock() for clock in clocks), client()
    sent = await sending
    return Shown(Outcome(ratios, sent.first_tokens_ms), sent.late_ms, router_share, client_share)


def busiest_over_mean(blocks: Sequence[float]) -> float:
    """Return the busiest worker's load over the mean of all; those that reported nothing are idle."""
    return max(blocks) * N_WORKERS / sum(blocks)


def _own_us() -> float:
    return time.process_time() * 1e6


def _share_clock(cpu_us: Callable[[], float]) -> Callable[[], float]:
    """Return a clock of the share of a core that was used since now."""
    began_s, began_us = time.monotonic(), cpu_us()
    return lambda: (cpu_us() - began_us) / 1e6 / (time.monotonic() - began_s)


def table_of(load: Load, shown: dict[Variant, list[Shown]]) -> list[Line]:
    """Set every variant next to one router, and tell what the machine had to do."""
    outcomes = {variant: [each.outcome for each in runs] for variant, runs in shown.items()}
    lines = []
    for variant in VARIANTS[1:]:
        lines += lines_of(load, variant.name, outcomes[variant], outcomes[ONE])
    lines.sort(key=lambda line: line.unit)
    for what, unit, pick in (
        ("busiest router", SHARE_UNIT, lambda each: [each.router_share]),
        ("client", SHARE_UNIT, lambda each: [each.client_share]),
        ("client", LATE_UNIT, lambda each: each.late_ms),
    ):
        for variant, runs in shown.items():
            lines.append(Line(f"{what}, {load.name}", variant.name, unit, measured([*map(pick, runs)])))
    return lines


async def measure(
    frontends: dict[bool, list[Server]], folder: Path, note: Callable[[str], None]
) -> list[Line]:
    """Run the load once a seed before every variant, one after the other: each meets the machine's moods."""
    shown: dict[Variant, list[Shown]] = {variant: [] for variant in VARIANTS}
    prompts = 0
    async with loads_of(folder) as loads:
        for frontend in (*frontends[False], *frontends[True]):
            await wait_ready(frontend.port)
        for seed in SEEDS:
            for variant in VARIANTS:
                note(f"{LOAD.name}, {variant.name}, seed {seed}")
                prompts += 1
                serving = frontends[variant.syncs][: variant.n_frontends]
                shown[variant].append(await run(LOAD, serving, loads, seed=seed, prompts=prompts))
    return table_of(LOAD, shown)


def start(stack: ExitStack, folder: Path) -> dict[bool, list[Server]]:
    """Start everything, until the stack ends; return the frontends by whether they sync."""
    store = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-bench-"))
    url = stack.enter_context(nats_server("-js", "-sd", store))
    stack.enter_context(mock_workers(folder))
    python, n_frontends = Path(sys.executable), max(variant.n_frontends for variant in VARIANTS)
    frontends: dict[bool, list[Server]] = {False: [], True: []}
    for syncs, flags in ((False, ()), (True, ("--router-replica-sync", "--nats-server", url))):
        for _ in range(n_frontends):
            frontends[syncs].append(stack.enter_context(our_frontend(python, folder, *flags)))
    for syncs, servers in frontends.items():
        for frontend in servers:
            wait_joined(frontend, N_WORKERS)
            if syncs:
                wait_heard(frontend, n_frontends - 1)
    return frontends


def wait_heard(frontend: Server, n_others: int) -> None:
    """Return once the frontend hears so many others. Raises TimeoutError."""
    heard = f"kvrouter_replicas {float(n_others)}\n".encode()
    until_s = time.monotonic() + HEARD_WITHIN_S
    while heard not in fetch(f"http://127.0.0.1:{frontend.port}/metrics"):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{n_others} other frontends are not heard after {HEARD_WITHIN_S:g} s")
        time.sleep(0.2)


@click.command()
def main() -> None:
    """Send the load before 1 to 4 frontends, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    with ExitStack() as stack, console.status("processes start") as status:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-bench-")))
        folder = home / "discovery"
        frontends = start(stack, folder)
        lines = uvloop.run(measure(frontends, folder, status.update))
    versions = {name: version(name) for name in ("kvrouter", "nats-py", "pyzmq")}
    report("herd-processes", lines, versions, load_average, console, keep=True)


if __name__ == "__main__":
    main()
