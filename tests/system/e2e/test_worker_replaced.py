"""Two workers with one id: the newer start has the place, and the older one finishes what runs and ends."""

import asyncio

import pytest

from kvrouter.app.lifetime import LOST_PLACE
from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import ENDS_WITHIN_S, eventually, fleet

SHORT = {"model": "mock", "prompt": words(n=20), "max_tokens": 4}
LONG = {**SHORT, "max_tokens": 8000, "ignore_eos": True, "stream": True}
"""It lasts until its client leaves."""

AFTER_LINES = 1000
"""More than was on its way."""


@pytest.mark.parametrize("store", ["file", "nats"])
async def test_a_replaced_worker_finishes_running_requests_and_ends(
    store: str, shared_nats: NatsServer
) -> None:
    settings = {
        "DYN_DISCOVERY_BACKEND": store,
        "NATS_SERVER": shared_nats.url,
        "DYN_EVENT_PLANE": "zmq",
    }
    async with fleet(settings) as processes:
        frontend = await processes.frontend()
        old = await processes.worker("--worker-id", "7", "--speedup", "1")

        async def is_served() -> bool:
            return (await frontend.http.post("/v1/completions", json=SHORT)).status_code == 200

        await eventually(is_served)
        async with frontend.http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            new = await processes.worker("--worker-id", "7", "--speedup", "20")

            async def is_replaced() -> bool:
                return "running_requests=1" in old.lines()

            await eventually(is_replaced)
            for _ in range(AFTER_LINES):
                await anext(lines)
            assert old.is_running
        async with asyncio.timeout(ENDS_WITHIN_S):
            assert await old.process.wait() == LOST_PLACE
        assert "replaced by a newer start of the same id: ending" in old.lines()
        assert new.is_running
        assert "worker_replaced" not in new.lines()
        await eventually(is_served)
