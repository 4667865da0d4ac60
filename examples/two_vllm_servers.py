"""Route over vLLM servers that run, without worker processes: pick a worker, and stream its answer.

It takes the servers' URLs::

    python examples/two_vllm_servers.py http://10.0.0.7:8000 http://10.0.0.8:8000
"""

import asyncio
import sys

from kvrouter import KvRouter, Runtime


async def main(*urls: str) -> None:
    """Attach the servers, and send one prompt twice: the second time its blocks are cached somewhere."""
    async with Runtime.in_process() as runtime:
        for url in urls:
            card = await runtime.attach("vllm", url)
            print(f"worker {card.worker_id}: {card.model} at {url}, blocks of {card.block_size} tokens")
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        async with KvRouter(endpoint) as router:
            prompt, stop = list(range(20, 20 + 256)), {"max_tokens": 16}
            for _ in range(2):
                worker_id, _, blocks = await router.best_worker(prompt)
                print(f"worker {worker_id}, {blocks} blocks of the prompt are there:", end="")
                answer = await router.generate(prompt, worker_id=worker_id, stop_conditions=stop)
                async for piece in answer:
                    print("", *piece["token_ids"], end="", flush=True)
                print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
