"""Clients that come before the workers are asked to come again, and OpenAI's client does."""

import asyncio

import openai
import pytest

from tests.testing.processes import eventually, fleet

MANY = 60
"""The client waits the second that ``Retry-After`` asks for, or up to 8 s without one."""


async def test_openais_client_retries_until_the_first_workers_join() -> None:
    async with fleet() as processes:
        frontend = await processes.frontend("--router-min-initial-workers", "2")
        async with openai.AsyncOpenAI(
            base_url=f"{frontend.url}/v1", api_key="none", max_retries=MANY
        ) as client:
            asked = asyncio.create_task(
                client.chat.completions.create(
                    model="mock", max_tokens=4, messages=[{"role": "user", "content": "hello"}]
                )
            )

            async def was_reported_to_wait() -> bool:
                return (await frontend.metrics()).total("requests_total", status="503") > 0

            await eventually(was_reported_to_wait)
            assert (await frontend.http.get("/accepting")).status_code == 503
            await processes.worker("--speedup", "20")
            answer = await asked
            assert answer.choices[0].finish_reason == "length"
            assert "1 of 2" in (await frontend.http.get("/accepting")).text
            await processes.worker("--speedup", "20", "--worker-id", "2")

            async def accepts() -> bool:
                return (await frontend.http.get("/accepting")).status_code == 200

            await eventually(accepts)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="nobodys", prompt="hello")
