"""One request id at two frontends at once, as when a proxy sends a request again: both are answered."""

import asyncio

from tests.support.processes import Frontend, eventually, fleet
from tests.support.served import words

ASKED_AGAIN = {"x-request-id": "of-the-proxy"}
BODY = {"model": "mock", "prompt": words(n=400), "max_tokens": 8}


async def has_cached(frontend: Frontend) -> bool:
    page = await frontend.fleet()
    return any(rank["index_blocks"] for worker in page["workers"] for rank in worker["ranks"])


async def test_a_request_that_still_runs_for_another_frontend_is_answered_too() -> None:
    async with fleet() as processes:
        for _ in range(2):
            await processes.worker()
        first, second = await processes.frontend(), await processes.frontend()
        slow = {**BODY, "max_tokens": 4096, "stream": True}
        async with first.http.stream("POST", "/v1/completions", json=slow, headers=ASKED_AGAIN) as running:
            assert running.status_code == 200
            lines = running.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await eventually(lambda: has_cached(second))  # so it will choose the same worker
            async with asyncio.timeout(60.0):
                again = await second.http.post("/v1/completions", json=BODY, headers=ASKED_AGAIN)
            assert again.status_code == 200, again.text
            assert again.json()["usage"]["completion_tokens"] == 8
            assert (await anext(lines)) is not None
