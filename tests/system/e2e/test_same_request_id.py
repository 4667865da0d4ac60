"""One request id again and again, as of a proxy that sends it twice: one worker answers them all."""

import asyncio
from functools import partial

from tests.testing.mock_server import words
from tests.testing.processes import eventually, fleet

ASKED_AGAIN = {"x-request-id": "of-the-proxy"}
BODY = {"model": "mock", "prompt": words(n=400), "max_tokens": 8}


async def test_repeated_request_ids_are_all_answered() -> None:
    async with fleet() as processes:
        await processes.worker()
        first, second = await processes.frontend(), await processes.frontend()
        for frontend in (first, second):
            await eventually(partial(frontend.serves, 1))
        slow = {**BODY, "max_tokens": 4096, "stream": True}
        async with first.http.stream("POST", "/v1/completions", json=slow, headers=ASKED_AGAIN) as running:
            assert running.status_code == 200
            lines = running.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            async with asyncio.timeout(60.0):
                again = await second.http.post("/v1/completions", json=BODY, headers=ASKED_AGAIN)
            assert again.status_code == 200, again.text
            assert again.json()["usage"]["completion_tokens"] == 8
            assert again.headers["x-request-id"] == ASKED_AGAIN["x-request-id"]
            assert (await anext(lines)) is not None
        for frontend in (first, second, first):
            once_more = await frontend.http.post("/v1/completions", json=BODY, headers=ASKED_AGAIN)
            assert once_more.status_code == 200, once_more.text
            # The first frontend may still have the request whose client just left: then the id is longer.
            assert once_more.headers["x-request-id"].startswith(ASKED_AGAIN["x-request-id"])
