"""Prefill here, decode there: by the routers of both endpoints, and as a pair that is picked whole."""

import asyncio
from pathlib import Path

from kvrouter import KvRouter, mock_fleet

FLEET = Path(__file__).with_name("fleet.yaml")


async def main() -> None:
    """Send both legs of a request by hand, then ask for the pair and let the router send it."""
    async with mock_fleet(FLEET) as runtime:
        namespace = runtime.namespace("default")
        prefill_endpoint = namespace.component("prefill").endpoint("generate")
        endpoint = namespace.component("backend").endpoint("generate")
        client = await endpoint.client()
        async with (
            KvRouter(prefill_endpoint, block_size=64) as prefills,
            KvRouter(endpoint, block_size=64) as router,
        ):
            prompt = list(range(256, 256 + 640))
            pair = await router.best_workers(prompt, request_id="by-hand-1")
            if pair.prefill is None or pair.decode is None:
                raise SystemExit("the fleet is not split")
            print(f"prefill on {pair.prefill.worker_id}, decode on {pair.decode.worker_id}")
            request: dict[str, object] = {"token_ids": prompt, "stop_conditions": {"max_tokens": 8}}
            async for piece in await prefills.generate(prompt, worker_id=pair.prefill.worker_id):
                request["prefill_worker_id"] = piece["prefill_worker_id"]
                if "bootstrap" in piece:
                    request["bootstrap"] = piece["bootstrap"]
                else:
                    request["kv_transfer_params"] = piece["kv_transfer_params"]
            await router.mark_prefill_complete("by-hand-1")
            answer = await client.direct(request, pair.decode.worker_id)
            print("by hand:", [token async for piece in answer for token in piece["token_ids"]])
            await router.free("by-hand-1")

            answer = await router.generate(
                prompt,
                worker_id=pair.decode.worker_id,
                prefill_worker_id=pair.prefill.worker_id,
                stop_conditions={"max_tokens": 8},
            )
            print("as a pair:", [token async for piece in answer for token in piece["token_ids"]])
        client.close()


if __name__ == "__main__":
    asyncio.run(main())
