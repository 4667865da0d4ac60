"""Thousands of requests through two frontends, while workers are killed and come back all the time."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.support.file_fleet import FileFleet
from tests.support.load import Load
from tests.support.nats_server import NatsServer
from tests.support.processes import fleet

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
    pytest.param({}, 10_000, id="file-tcp-zmq"),
    pytest.param(
        {
            "DYN_DISCOVERY_BACKEND": "nats",
            "DYN_ROUTER_REPLICA_SYNC": "true",
            "DYN_ROUTER_SNAPSHOT_THRESHOLD": "500",
        },
        4_000,
        id="nats-tcp-jetstream-sync",
    ),
]
KILL_EVERY_S = 3.0
GROWTH_MAX_BYTES = 6 * 1024 * 1024
"""How much more than after the first round a process may hold at the end: under a KiB for each request."""


async def churn(here: FileFleet, seed: int) -> None:
    """Kill a worker of zone a, bring it back, and so on."""
    draw = random.Random(seed)
    while True:
        victim = draw.choice([*here.group("prefill"), *here.group("decode")])
        await here.workers[victim].kill()
        await here.start_worker(victim)
        await here.is_known(victim)
        await asyncio.sleep(KILL_EVERY_S)


@pytest.mark.parametrize(("environ", "n_requests"), PLANES)
async def test_every_request_is_answered_while_workers_come_and_go(
    environ: dict[str, str],
    n_requests: int,
    shared_nats: NatsServer,
    record_property: Callable[[str, object], None],
) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "KVROUTER_LEASE_S": "3", **environ}
    async with fleet(settings) as processes:
        here = await FileFleet.begin(processes, FLEET)
        stayed = [*here.frontends, *(here.workers[each] for each in (5, 6))]
        memory: list[list[int]] = []
        for number in range(ROUNDS):
            load = Load(here.frontends, seed=number)
            deaths = asyncio.create_task(churn(here, number))
            await load.ask(n_requests // ROUNDS)
            deaths.cancel()
            await asyncio.wait([deaths])
            assert deaths.cancelled(), deaths.exception()
            answers = load.answers
            assert (answers.whole, answers.total) == (n_requests // ROUNDS,) * 2, answers.errors
            for worker_id, running in here.workers.items():
                if not running.is_running:
                    await here.start_worker(worker_id)
            await here.is_well(answers.prompts)
            memory.append([each.rss_bytes() for each in stayed])
        record_property("memory", str(memory))
        if "DYN_ROUTER_SNAPSHOT_THRESHOLD" in environ:
            assert any("index_stored" in each.lines() for each in here.frontends)
        await here.start_frontend("late")
        await here.is_well(answers.prompts)
        for name, first, *_, last in zip([each.name for each in stayed], *memory, strict=True):
            assert last - first < GROWTH_MAX_BYTES, f"{name}: {memory}"
