"""What ``--router-snapshot-threshold`` and ``--router-reset-states`` do to frontends that are processes."""

from functools import partial

import nats
from nats.aio.client import Client
from nats.js.api import StreamInfo

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Fleet, Frontend, eventually, fleet

THRESHOLD = 4
BLOCKS = 3
SETTINGS = {
    "DYN_DISCOVERY_BACKEND": "nats",
    "DYN_ROUTER_SNAPSHOT_THRESHOLD": str(THRESHOLD),
    "KVROUTER_LEASE_S": "600",
}
"""A worker that is frozen stays announced: it cannot be asked for its blocks, and is not gone."""


async def held_blocks(frontend: Frontend) -> int:
    ranks = [rank for worker in (await frontend.fleet())["workers"] for rank in worker["ranks"]]
    return sum(rank["index_blocks"] for rank in ranks)


async def stream(client: Client, processes: Fleet) -> StreamInfo:
    return await client.jetstream().stream_info(f"kvrouter-{processes.namespace}-backend-kv-events")


async def test_a_restarted_router_restores_the_index_without_its_worker(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    try:
        async with fleet({"NATS_SERVER": shared_nats.url, **SETTINGS}) as processes:
            worker = await processes.worker("--speedup", "20")
            first = await processes.frontend()

            async def is_stored() -> bool:
                """Ask for other prompts until the stream was too long; then it is purged."""
                return "index_stored" in first.lines()

            await eventually(lambda: is_served(first, 0))
            for number in range(1, 2 * THRESHOLD):
                assert await is_served(first, number)
            await eventually(is_stored)
            assert (await stream(client, processes)).state.first_seq > 1, "nothing was purged"
            held = 2 * THRESHOLD * BLOCKS
            await eventually(lambda: holds(first, held))
            assert "events_foreign" not in first.lines(), (
                "its loads come by both lanes of NATS, and are its own"
            )
            await first.kill()
            worker.pause()

            second = await processes.frontend()
            await eventually(lambda: holds(second, held))
            await second.stop()

            third = await processes.frontend("--router-reset-states")

            async def is_reset() -> bool:
                return "states_reset" in third.lines()

            await eventually(is_reset)
            left = await stream(client, processes)
            assert left.state.messages == 0
            fourth = await processes.frontend()
            await eventually(partial(fourth.serves, 1))
            assert await held_blocks(fourth) == 0, "a snapshot was left"
    finally:
        await client.close()


async def is_served(frontend: Frontend, number: int) -> bool:
    """Whether a prompt of :data:`BLOCKS` blocks that no other ``number`` shares is answered."""
    body = {"model": "mock", "prompt": f"{number} {words(n=199)}", "max_tokens": 1}
    return (await frontend.http.post("/v1/completions", json=body)).status_code == 200


async def holds(frontend: Frontend, blocks: int) -> bool:
    return await held_blocks(frontend) == blocks
