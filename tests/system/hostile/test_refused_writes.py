"""A NATS store that answers and takes no writes: the fleet is frozen as it was, and serves."""

import asyncio
from typing import Any

from tests.system.hostile.meter import Meter
from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet

LEASE_S = 2.0
FROZEN_CPU_MAX = 0.1
"""Of one core for the frontend's event loop while nothing is written: a hundredth was seen."""

BODY = {"model": "mock", "prompt": words(n=70), "max_tokens": 2}


async def is_served(frontend: Frontend) -> bool:
    return (await frontend.http.post("/v1/completions", json=BODY)).status_code == 200


async def states(frontend: Frontend) -> dict[int, tuple[bool, bool]]:
    """Whether each worker answers, and whether its lease lapsed."""
    workers: list[dict[str, Any]] = (await frontend.fleet())["workers"]
    return {each["worker_id"]: (each["alive"], each["lapsed"]) for each in workers}


async def test_a_read_only_store_freezes_the_fleet_and_keeps_paused_workers(
    own_nats: NatsServer,
) -> None:
    settings = {
        "DYN_DISCOVERY_BACKEND": "nats",
        "NATS_SERVER": own_nats.url,
        "DYN_EVENT_PLANE": "zmq",
        "KVROUTER_LEASE_S": str(LEASE_S),
        "KVROUTER_DEAD_AFTER_S": "5",
    }
    all_well = {1: (True, False), 2: (True, False)}
    async with fleet(settings) as processes:
        workers = [await processes.worker("--worker-id", str(worker_id)) for worker_id in (1, 2)]
        frontend = await processes.frontend()

        async def is_well() -> bool:
            is_reachable = (await frontend.fleet())["discovery"]["reachable"]
            return is_reachable and await frontend.serves(2) and await states(frontend) == all_well

        async def is_frozen() -> bool:
            return not (await frontend.fleet())["discovery"]["reachable"]

        async def is_silent() -> bool:
            return (await states(frontend))[1] == (False, False)

        async def all_answer() -> bool:
            return await states(frontend) == all_well

        await eventually(is_well)
        own_nats.refuse_writes()
        await eventually(is_frozen)
        loop, meter = asyncio.get_running_loop(), Meter(frontend.pid)
        frozen_s, before_s = loop.time(), meter.loop_cpu_s()
        assert await is_served(frontend)
        workers[0].pause()
        await eventually(is_silent)
        await asyncio.sleep(2 * LEASE_S)  # its lease runs out, and nobody can tell
        assert (await states(frontend))[1] == (False, False), "frozen, not forgotten"
        workers[0].resume()
        await eventually(all_answer)
        own_nats.allow_writes()
        await asyncio.sleep(2 * LEASE_S)  # nats-server goes on refusing until it starts again
        assert await is_frozen()
        await eventually(all_answer)
        assert meter.loop_cpu_s() - before_s < FROZEN_CPU_MAX * (loop.time() - frozen_s)
        own_nats.restart()
        await eventually(is_well)
        await eventually(lambda: is_served(frontend))
        await frontend.has_logged("takes no writes")
        await workers[1].kill()

        async def is_forgotten() -> bool:
            return list(await states(frontend)) == [1]

        await eventually(is_forgotten)
