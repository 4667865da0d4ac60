"""Without KV events nothing needs a broker: the router predicts caches from its own decisions."""

import pytest

from tests.support.processes import eventually, fleet
from tests.support.served import words

NOBODY = "nats://127.0.0.1:1"
BODY = {"model": "mock", "prompt": words(n=200), "max_tokens": 4}


@pytest.mark.parametrize("event_plane", ["auto", "jetstream"])
async def test_without_kv_events_nobody_looks_for_nats(event_plane: str) -> None:
    async with fleet({"NATS_SERVER": NOBODY, "DYN_EVENT_PLANE": event_plane}) as processes:
        await processes.worker("--no-kv-events", "--speedup", "20")
        frontend = await processes.frontend("--no-kv-events", environ={"DYN_ROUTER_TTL": "600"})

        async def overlap_blocks() -> int:
            reply = await frontend.http.post("/v1/completions", json=BODY)
            if reply.status_code != 200:
                return -1
            decision = (
                await frontend.http.get(f"/v1/decisions/{reply.json()['id'].removeprefix('cmpl-')}")
            ).raise_for_status()
            blocks: int = decision.json()["attempts"][-1]["decode"]["overlap_blocks"]
            return blocks

        async def is_predicted() -> bool:
            return await overlap_blocks() == 3

        await eventually(is_predicted)
        assert not (await frontend.metrics()).total("kv_events_missing")

        async def load_is_heard() -> bool:
            (worker,) = (await frontend.fleet())["workers"]
            return worker["ranks"][0]["report"] is not None

        await eventually(load_is_heard)
