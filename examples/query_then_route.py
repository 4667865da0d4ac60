"""Ask the router where a request would go, without changing anything, and decide with that."""

import asyncio
from pathlib import Path

from kvrouter import KvIndexer, KvRouter, mock_fleet

FLEET = Path(__file__).with_name("fleet-aggregated.yaml")


async def main() -> None:
    """Compare what the index says with what the router would pick, then send to a worker of our choice."""
    async with mock_fleet(FLEET) as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        prompt = list(range(256, 256 + 640))
        async with KvRouter(endpoint, block_size=32) as router, KvIndexer(endpoint, block_size=32) as indexer:
            async for _ in await router.generate(prompt, stop_conditions={"max_tokens": 4}):
                pass
            print("cached:", await indexer.find_matches_for_request(prompt))
            worker_id, dp_rank, overlap_blocks = await router.best_worker(
                prompt, router_config_override={"overlap_score_weight": 2.0}
            )
            print(f"would go to {worker_id}/{dp_rank} for {overlap_blocks} blocks")
            answer = await router.generate(prompt, worker_id=worker_id, stop_conditions={"max_tokens": 4})
            print("answer:", [token async for piece in answer for token in piece["token_ids"]])


if __name__ == "__main__":
    asyncio.run(main())
