"""Pick and book with the router, send the request yourself, and report its progress to the router."""

import asyncio
from pathlib import Path

from kvrouter import KvRouter, mock_fleet

FLEET = Path(__file__).with_name("fleet-aggregated.yaml")


async def main() -> None:
    """Book a worker for a request, send it there with a plain client, then free it."""
    async with mock_fleet(FLEET) as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        client = await endpoint.client()
        async with KvRouter(endpoint, block_size=32) as router:
            prompt = list(range(256, 256 + 320))
            worker_id, dp_rank, overlap_blocks = await router.best_worker(prompt, request_id="by-hand-1")
            print(f"booked {worker_id}/{dp_rank}, {overlap_blocks} blocks are there")
            request = {"token_ids": prompt, "stop_conditions": {"max_tokens": 8}, "dp_rank": dp_rank}
            first = True
            async for piece in await client.direct(request, worker_id):
                if first:
                    await router.mark_prefill_complete("by-hand-1")
                    first = False
                print(f"  {piece['token_ids']}")
            await router.free("by-hand-1")
        client.close()


if __name__ == "__main__":
    asyncio.run(main())
