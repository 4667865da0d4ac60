"""One mock engine in a process of its own, for tests that kill it: ``python -m tests.testing.mock_peer``.

It says that it is there, and reads one line of JSON: ``{}`` for a prefill engine, or the
``kv_transfer_params`` that a decode engine pulls by. The prefill engine answers one leg and prints its
params; the decode engine pulls over links on which no transfer ends. Both then stay until they are killed.
"""

import asyncio
import json
import sys

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.config import MockConfig
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_processes import N_PROMPT, SETTINGS, SLOW_LINKS, SPEEDUP, read_all, start


async def main() -> None:
    print("here", flush=True)
    params = json.loads(await asyncio.to_thread(sys.stdin.readline))
    cluster = MockCluster(speedup=SPEEDUP, links=SLOW_LINKS, transfers=SETTINGS)
    await cluster.listen("127.0.0.1")
    role, leg = (Role.DECODE, Leg.DECODE) if params else (Role.PREFILL, Leg.PREFILL)
    engine = cluster.add(MockConfig(role=role), worker_id=WorkerId(7), domains={"zone": "far"})
    await start(engine)
    stream = await engine.submit(
        plain_leg(
            "x",
            range(N_PROMPT),
            leg,
            max_tokens=1 if leg is Leg.PREFILL else 20,
            kv_transfer_params=params or None,
        )
    )
    if leg is Leg.PREFILL:
        _, last = await read_all(stream)
        print(json.dumps(last.kv_transfer_params), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
