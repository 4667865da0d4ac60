"""Thousands of requests through two frontends, while workers are killed and come back all the time."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median

import pytest

from tests.testing.fleet_processes import (
    FILE_TCP_ZMQ,
    NATS_HTTP_JETSTREAM,
    NATS_NATS_CORE,
    NATS_TCP_JETSTREAM_SYNC,
    FleetProcesses,
    FleetTransports,
    fleet_processes,
)
from tests.testing.load_generator import LoadGenerator
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology: {levels: [zone], links: {within: {zone: {latency_s: 0.02, bandwidth_bytes_per_s: 1.0e+11}}}}
kv_transfer: {domain: zone, enforcement: required}
speedup: 20
workers:
  - {name: prefill, role: prefill, replicas: 2, domains: {zone: a}, engine: &engine {
      kv_wait_expiry_s: 2, total_kv_blocks: 512}}
  - {name: decode, role: decode, replicas: 2, domains: {zone: a}, engine: *engine}
  - {name: prefill-b, role: prefill, replicas: 1, domains: {zone: b}, engine: *engine}
  - {name: decode-b, role: decode, replicas: 1, domains: {zone: b}, engine: *engine}
"""
"""Zone b is left alone; whoever dies in zone a has a twin there."""

ROUNDS = 5
PLANES = [
    (FILE_TCP_ZMQ, 10_000),
    (NATS_TCP_JETSTREAM_SYNC, 10_000),
    (NATS_HTTP_JETSTREAM, 4_000),
    (NATS_NATS_CORE, 4_000),
]
SNAPSHOTS_OFTEN = {"DYN_ROUTER_SNAPSHOT_THRESHOLD": "500"}
SNAPSHOTS = (NATS_TCP_JETSTREAM_SYNC, NATS_HTTP_JETSTREAM)
KILL_EVERY_S = 3.0
LEAVES_IN_ORDER = 0.25
"""The share of workers that are stopped and not killed."""

GROWTH_MAX_BYTES = 3 * 1024 * 1024
"""How much more a process may hold after a round than after the one before, in the median round: a leak grows
in all of them, an allocator that takes a few megabytes at once does it in one. In the four rounds after the
first that is twice what a worker remembers of legs that have ended, 4,096 prefill legs of 1.1 KB and 8,192
keys of 0.3 KB.
"""


async def churn(here: FleetProcesses, seed: int, over: asyncio.Event) -> None:
    """End a worker of zone a, bring it back, and so on; at the end all are there."""
    draw = random.Random(seed)
    while not over.is_set():
        victim = draw.choice([*here.group("prefill"), *here.group("decode")])
        if draw.random() < LEAVES_IN_ORDER:
            assert await here.workers[victim].stop() == 0
        else:
            await here.workers[victim].kill()
        await here.start_worker(victim)
        await here.is_known(victim)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_EVERY_S):
                await over.wait()


async def is_stored(here: FleetProcesses) -> bool:
    return any("index_stored" in each.lines() for each in here.frontends)


@pytest.mark.parametrize(("planes", "n_requests"), PLANES, ids=str)
async def test_every_request_is_answered_while_workers_come_and_go(
    planes: FleetTransports,
    n_requests: int,
    shared_nats: NatsServer,
    record_property: Callable[[str, object], None],
) -> None:
    async with fleet_processes(FLEET, planes, shared_nats, environ=SNAPSHOTS_OFTEN) as here:
        left_alone = [*here.group("prefill-b"), *here.group("decode-b")]
        stayed = [*here.frontends, *(here.workers[each] for each in left_alone)]
        memory: list[list[int]] = []
        for number in range(ROUNDS):
            load = LoadGenerator(here.frontends, seed=number)
            over = asyncio.Event()
            deaths = asyncio.create_task(churn(here, number, over))
            await load.ask(n_requests // ROUNDS)
            over.set()
            await deaths
            answers = load.answers
            assert (answers.whole, answers.total) == (n_requests // ROUNDS,) * 2, answers.errors
            await here.is_well(answers.prompts)
            memory.append([each.rss_bytes() for each in stayed])
        record_property("memory", str(memory))
        if planes in SNAPSHOTS:
            await eventually(lambda: is_stored(here))
        await here.start_frontend("late")
        await here.is_well(answers.prompts)
        for name, *held in zip([each.name for each in stayed], *memory, strict=True):
            growth = median(after - before for before, after in pairwise(held))
            assert growth < GROWTH_MAX_BYTES, f"{name}: {held}"
