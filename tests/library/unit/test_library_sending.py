"""The plain client of an endpoint: to anybody, in turn, or to one."""

import asyncio

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest, NoEligibleWorker
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.library import Client
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.blocks import reported_by
from tests.testing.embedding_program import program, tokens_of
from tests.testing.mock_fleet import prompt, uniform_fleet

REQUEST: dict[str, object] = {"token_ids": prompt().tolist(), "stop_conditions": {"max_tokens": 3}}


def distinct(n: int) -> dict[str, object]:
    return {"token_ids": prompt(first=n).tolist(), "stop_conditions": {"max_tokens": 3}}


async def test_every_send_method_returns_the_answer() -> None:
    async with program(uniform_fleet(replicas=3)) as here:
        client = await here.endpoint.client()
        answers = [
            await tokens_of(await client.generate(REQUEST)),
            await tokens_of(await client.random(REQUEST)),
            await tokens_of(await client.round_robin(REQUEST)),
            await tokens_of(await client.direct(REQUEST, 2)),
        ]
        assert all(answer == answers[0] and len(answer) == 3 for answer in answers)
        client.close()


async def test_round_robin_and_random_reach_every_worker() -> None:
    async with program(uniform_fleet(replicas=3)) as here:
        client = await here.endpoint.client()

        def blocks() -> list[int]:
            workers = [here.fleet.workers[WorkerId(n)] for n in (1, 2, 3)]
            return [len(reported_by(worker, DpRank(0))) for worker in workers]

        for n in range(3):
            await tokens_of(await client.round_robin(distinct(n)))
        assert all(blocks()), "each worker got one"
        before = blocks()
        for n in range(40):
            await tokens_of(await client.random(distinct(100 + n)))
        assert all(after > was for was, after in zip(before, blocks(), strict=True))
        client.close()


async def test_direct_requests_reach_the_named_rank() -> None:
    async with program(uniform_fleet(replicas=1, dp_size=2)) as here:
        client = await here.endpoint.client()
        await tokens_of(await client.direct({**REQUEST, "dp_rank": 1}, 1))
        worker = here.fleet.workers[WorkerId(1)]
        assert reported_by(worker, DpRank(1))
        assert not reported_by(worker, DpRank(0))
        with pytest.raises(InvalidRequest) as wrong:
            await client.direct({**REQUEST, "dp_rank": 2}, 1)
        assert wrong.value.param == "dp_rank"
        client.close()


async def test_unknown_dead_and_draining_workers_are_refused() -> None:
    async with program(uniform_fleet(replicas=2)) as here:
        client = await here.endpoint.client()
        with pytest.raises(InvalidRequest, match="worker_id"):
            await client.direct(REQUEST, 9)
        here.fleet.workers[WorkerId(1)].die("without a word")
        with pytest.raises(WorkerUnreachable):
            await client.direct(REQUEST, 1)
        await here.fleet.kill(WorkerId(1))
        assert client.instance_ids() == [2]
        await here.fleet.workers[WorkerId(2)].begin_drain()
        assert client.instance_ids() == []
        with pytest.raises(NoEligibleWorker) as refused:
            await client.random(REQUEST)
        assert {reason.value: n for reason, n in refused.value.refusals.items()} == {"draining": 1}
        client.close()


async def test_workers_with_silent_engines_get_no_requests() -> None:
    async with program(uniform_fleet(replicas=3)) as here:
        client = await here.endpoint.client()
        for number in (2, 3):
            silent = replace(here.fleet.workers[WorkerId(number)].card, engine_silent=True)
            await here.runtime.discovery.publish(silent)
        assert client.instance_ids() == [1]
        await here.fleet.workers[WorkerId(1)].begin_drain()
        with pytest.raises(NoEligibleWorker) as refused:
            await client.random(REQUEST)
        reasons = {reason.value: n for reason, n in refused.value.refusals.items()}
        assert reasons == {"draining": 1, "engine_silent": 2}
        client.close()


async def test_wait_for_instances_waits_for_the_first_worker() -> None:
    async with program(uniform_fleet(replicas=1)) as here:
        client = Client(here.runtime.namespace("default").component("late").endpoint("generate"))
        await client.follow()
        waiting = asyncio.create_task(client.wait_for_instances())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        client.close()
        ready = await here.endpoint.client()
        assert await ready.wait_for_instances() == [1]
        ready.close()
