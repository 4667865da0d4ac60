"""Two frontends with one replica name on JetStream: each has a consumer of its own, and hears everything."""

import nats
from nats.errors import Error
from nats.js.api import ConsumerInfo

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet

SETTINGS = {"DYN_DISCOVERY_BACKEND": "nats", "DYN_EVENT_PLANE": "jetstream", "KVROUTER_REPLICA_NAME": "twin"}
BLOCKS = 3


async def held_blocks(frontend: Frontend) -> int:
    ranks = [rank for worker in (await frontend.fleet())["workers"] for rank in worker["ranks"]]
    return sum(rank["index_blocks"] for rank in ranks)


async def test_frontends_of_one_replica_name_have_separate_consumers(
    shared_nats: NatsServer,
) -> None:
    client = await nats.connect(shared_nats.url)
    try:
        async with fleet({"NATS_SERVER": shared_nats.url, **SETTINGS}) as processes:
            await processes.worker("--speedup", "20")
            twins = [await processes.frontend(), await processes.frontend()]
            stream = f"kvrouter-{processes.namespace}-backend-kv-events"

            async def consumers() -> list[ConsumerInfo]:
                try:
                    return await client.jetstream().consumers_info(stream)
                except Error:
                    return []

            async def each_has_its_own() -> bool:
                live = [each.name for each in await consumers() if each.push_bound]
                return sum(name.startswith("kvrouter-twin-") for name in live) == len(twins)

            await eventually(each_has_its_own)
            body = {"model": "mock", "prompt": words(n=200), "max_tokens": 4}

            async def is_served() -> bool:
                return (await twins[0].http.post("/v1/completions", json=body)).status_code == 200

            async def all_hear() -> bool:
                return all([await held_blocks(twin) >= BLOCKS for twin in twins])

            await eventually(is_served)
            await eventually(all_hear)
            await eventually(each_has_its_own)
    finally:
        await client.close()
