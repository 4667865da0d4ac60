"""An endpoint's client without KV routing: random, in turn, or to a named worker."""

import asyncio

from kvrouter import mock_fleet


async def main() -> None:
    """Send one request each way."""
    async with mock_fleet() as runtime:
        client = await runtime.namespace("default").component("backend").endpoint("generate").client()
        workers = await client.wait_for_instances()
        request = {"token_ids": list(range(256, 320)), "stop_conditions": {"max_tokens": 4}}
        for name, answer in (
            ("generate", await client.generate(request)),
            ("random", await client.random(request)),
            ("round_robin", await client.round_robin(request)),
            (f"direct to {workers[0]}", await client.direct(request, workers[0])),
        ):
            print(name, [token async for piece in answer for token in piece["token_ids"]])
        client.close()


if __name__ == "__main__":
    asyncio.run(main())
