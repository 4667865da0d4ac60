"""Let the router do everything: pick a worker or a pair, send, keep its load true, bring the tokens back."""

import asyncio
from pathlib import Path

from kvrouter import KvRouter, KvRouterConfig, mock_fleet

FLEET = Path(__file__).with_name("fleet-aggregated.yaml")


async def main() -> None:
    """Send the same prompt twice; the second time its blocks are cached somewhere, and it goes there."""
    async with mock_fleet(FLEET) as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        config = KvRouterConfig(overlap_score_weight=1.0, router_temperature=0.0)
        async with KvRouter(endpoint, block_size=32, kv_router_config=config) as router:
            prompt = list(range(256, 256 + 640))
            for turn in ("first", "second"):
                answer = await router.generate(prompt, stop_conditions={"max_tokens": 16})
                tokens = [token async for piece in answer for token in piece["token_ids"]]
                worker_id, dp_rank, blocks = await router.best_worker(prompt)
                print(f"{turn}: {len(tokens)} tokens; next time {worker_id}/{dp_rank}, {blocks} blocks there")


if __name__ == "__main__":
    asyncio.run(main())
