"""Routing of your own: send each request where the least prefill work stands before its first token."""

import asyncio
from pathlib import Path

from kvrouter import Endpoint, KvRouter, mock_fleet

FLEET = Path(__file__).with_name("fleet-aggregated.yaml")


async def least_ttft(router: KvRouter, prompt: list[int]) -> tuple[int, int]:
    """Return the rank with the fewest potential prefill tokens; fewer decode blocks break ties."""
    loads = await router.get_potential_loads(prompt)
    best = min(loads, key=lambda load: (load["potential_prefill_tokens"], load["potential_decode_blocks"]))
    return best["worker_id"], best["dp_rank"]


async def send(endpoint: Endpoint, router: KvRouter, prompt: list[int]) -> None:
    """Send one prompt where our own rule says."""
    worker_id, dp_rank = await least_ttft(router, prompt)
    answer = await router.generate(
        prompt, worker_id=worker_id, dp_rank=dp_rank, stop_conditions={"max_tokens": 4}
    )
    tokens = [token async for piece in answer for token in piece["token_ids"]]
    print(f"{endpoint.component}/{worker_id} rank {dp_rank}: {tokens}")


async def main() -> None:
    """Send four different prompts at once."""
    async with mock_fleet(FLEET) as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        async with KvRouter(endpoint, block_size=32) as router:
            prompts = [list(range(256 + n, 256 + n + 320)) for n in range(4)]
            await asyncio.gather(*(send(endpoint, router, prompt) for prompt in prompts))


if __name__ == "__main__":
    asyncio.run(main())
