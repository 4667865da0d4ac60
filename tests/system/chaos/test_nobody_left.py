"""A fleet that loses its last worker again and again: a client gets one error then, and never else."""

import asyncio

import pytest

from tests.testing.fleet_processes import FILE_TCP_ZMQ, NATS_NATS_CORE, FleetTransports, fleet_processes
from tests.testing.load_generator import LoadGenerator
from tests.testing.nats_server import NatsServer

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
workers: [{name: worker, replicas: 2}]
"""
LOSSES = 4
NOBODY = "no_eligible_worker"


@pytest.mark.parametrize("planes", [FILE_TCP_ZMQ, NATS_NATS_CORE], ids=str)
async def test_requests_fail_only_while_no_worker_is_left(
    planes: FleetTransports, shared_nats: NatsServer
) -> None:
    clock_s = asyncio.get_running_loop().time
    async with fleet_processes(FLEET, planes, shared_nats) as here:
        load = LoadGenerator(here.frontends, at_once=4)
        loading = asyncio.create_task(load.ask(1_000_000))
        without: list[tuple[float, float]] = []
        for number in range(LOSSES):
            first, last = (1, 2) if number % 2 else (2, 1)
            await here.workers[first].kill()
            begins_s = clock_s()
            await here.workers[last].kill()
            await load.until_failures(8)
            await here.start_worker(last)
            await here.is_known(last)
            without.append((begins_s, clock_s()))
            await here.start_worker(first)
            await here.is_known(first)
        load.stop()
        await loading
        answers = load.answers
        assert answers.wrong == 0
        for failure in answers.failures:
            assert failure.code == NOBODY, failure
            assert any(begin <= failure.ended_s and failure.began_s <= end for begin, end in without), failure
        await here.is_well(answers.prompts)
