"""Two workers with one id: the newer start has the place, and the older one finishes what runs and ends."""

import asyncio

import pytest

from tests.support.nats_server import NatsServer
from tests.support.processes import ENDS_WITHIN_S, eventually, fleet
from tests.support.served import words

ANSWER_TOKENS = 400


@pytest.mark.parametrize("store", ["file", "nats"])
async def test_the_replaced_worker_finishes_what_runs_and_ends(store: str, shared_nats: NatsServer) -> None:
    settings = {
        "DYN_DISCOVERY_BACKEND": store,
        "NATS_SERVER": shared_nats.url,
        "DYN_EVENT_PLANE": "zmq",
        "KVROUTER_LEASE_S": "2",
    }
    async with fleet(settings) as processes:
        frontend = await processes.frontend()
        old = await processes.worker("--worker-id", "7", "--speedup", "1")

        async def is_there() -> bool:
            return len((await frontend.fleet())["workers"]) == 1

        await eventually(is_there)
        body = {"model": "mock", "prompt": words(n=20), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        running = asyncio.create_task(frontend.http.post("/v1/completions", json=body))

        async def is_running() -> bool:
            return (await frontend.metrics()).total("worker_running_requests") > 0 or running.done()

        await eventually(is_running)
        new = await processes.worker("--worker-id", "7", "--speedup", "20")
        async with asyncio.timeout(ENDS_WITHIN_S):
            assert await old.process.wait() == 1
        assert "replaced by a newer start of the same id: ending" in old.lines()
        assert (await running).status_code == 200
        assert new.is_running
        assert "worker_replaced" not in new.lines()
        after = await frontend.http.post("/v1/completions", json={**body, "max_tokens": 4})
        assert after.status_code == 200
