"""Workers that are restarted or scaled away in good order; and a fleet of two models."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from tests.testing.fleet_processes import FILE_TCP_ZMQ, NATS_HTTP_JETSTREAM, FleetTransports, fleet_processes
from tests.testing.load_generator import LoadGenerator
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually
from tests.testing.streaming_client import StreamingClient

FLEET = """
version: 1
models: [{name: mock, block_size: 64}, {name: other, block_size: 64}]
topology: {levels: [zone]}
kv_transfer: {domain: zone, enforcement: required}
speedup: 20
workers:
  - {name: prefill, model: mock, role: prefill, replicas: 2, domains: {zone: a},
      engine: {kv_wait_expiry_s: 2}}
  - {name: decode, model: mock, role: decode, replicas: 2, domains: {zone: a}}
  - {name: other, model: other, replicas: 1}
"""


@pytest.mark.parametrize("planes", [FILE_TCP_ZMQ, NATS_HTTP_JETSTREAM], ids=str)
async def test_a_rolling_restart_costs_no_answer_and_models_stay_separate(
    planes: FleetTransports, shared_nats: NatsServer
) -> None:
    async with fleet_processes(FLEET, planes, shared_nats) as here:
        load = LoadGenerator(here.frontends, at_once=4)
        loading = asyncio.create_task(load.ask(1_000_000))
        for worker_id in (*here.group("prefill"), *here.group("decode")):
            before = load.answers.total
            assert await here.workers[worker_id].stop() == 0
            await here.start_worker(worker_id)
            await here.is_known(worker_id)
            assert load.answers.total > before
        load.stop()
        await loading
        assert load.answers.whole == load.answers.total, load.answers.errors
        await here.is_well()

        (only,) = here.group("other")
        client = StreamingClient(here.frontends[0], max_tokens=16_000, model="other")
        await client.until(pieces=2)
        await here.workers[only].kill()
        assert "may take this request" in ((await client.end()).error or ""), client.error
        refused = await StreamingClient(here.frontends[1], max_tokens=8, model="other").end()
        assert "may take this request" in (refused.error or ""), refused.error
        assert (await StreamingClient(here.frontends[1], max_tokens=8).end()).is_whole, (
            "the other model goes on"
        )
        await here.start_worker(only)
        await here.is_well()
        assert (await StreamingClient(here.frontends[0], max_tokens=8, model="other").end()).is_whole
        await here.is_well()


SIX = """
version: 1
models: [{name: mock, block_size: 64}]
workers:
  - {name: stays, replicas: 2, engine: &engine {
      timing: {decode_base: 10, decode_linear: 0, decode_quadratic: 0}}}
  - {name: scaled, replicas: 4, engine: *engine}
"""
ANSWER_TOKENS = 300
"""Three seconds: longer than a worker may drain here."""


async def all_have_legs(frontend: Frontend) -> bool:
    workers = (await frontend.fleet())["workers"]
    return all(rank["active_blocks"] for worker in workers for rank in worker["ranks"])


async def has_resumed(frontends: Sequence[Frontend]) -> bool:
    """Whether an answer was cut and went on elsewhere."""
    return any(" resume " in each.lines() for each in frontends)


async def test_six_workers_scaled_to_two_and_back_under_load_cost_no_answer(
    shared_nats: NatsServer,
) -> None:
    planes = replace(FILE_TCP_ZMQ, flags=("--drain-limit-s", "1"))
    async with fleet_processes(SIX, planes, shared_nats) as here:
        load = LoadGenerator(here.frontends, at_once=12, answer_tokens=ANSWER_TOKENS)
        loading = asyncio.create_task(load.ask(1_000_000))
        scaled = here.group("scaled")
        await eventually(partial(all_have_legs, here.frontends[0]))
        assert await asyncio.gather(*(here.workers[each].stop() for each in scaled)) == [0] * len(scaled)
        await asyncio.gather(*(here.start_worker(each) for each in scaled))
        for worker_id in scaled:
            await here.is_known(worker_id)
        load.stop()
        await loading
        assert load.answers.whole == load.answers.total, load.answers.errors
        await eventually(partial(has_resumed, here.frontends))
        await here.is_well()
