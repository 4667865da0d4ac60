"""Frontends that tell each other what they run: one comes late and knows it, one dies and leaves no load."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from tests.testing.fleet_checks import wait_until_consistent
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet
from tests.testing.streaming_client import StreamingClient

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
workers:
  - {name: worker, replicas: 2, engine: {
      timing: {decode_base: 100, decode_min: 100, decode_linear: 0, decode_quadratic: 0}}}
"""
LONG_TOKENS = 4_000
"""More than are answered before the frontend is killed."""

SHORT_PROMPT = list(range(300, 320))


async def active_blocks(frontend: Frontend) -> dict[str, float]:
    """What a frontend counts as load, by worker; idle ones left out."""
    metrics = await frontend.metrics()
    return {labels["worker"]: blocks for labels, blocks in metrics.of("ledger_active_blocks") if blocks}


async def test_a_late_frontend_counts_only_live_replicas_requests(
    shared_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "DYN_ROUTER_REPLICA_SYNC": "true"}
    async with fleet(settings) as processes:
        file = processes.folder / "fleet.yaml"
        file.write_text(FLEET)
        for index in ("0", "1"):
            await processes.worker("--fleet", str(file), "--group", "worker", "--index", index)
        first = await processes.frontend()
        await wait_until_consistent(processes, [first], workers=2)
        clients = [StreamingClient(first, max_tokens=LONG_TOKENS) for _ in range(3)]
        for client in clients:
            await client.until(pieces=1)

        late = await processes.frontend()

        async def knows_it_all() -> bool:
            reported, heard = await active_blocks(first), await active_blocks(late)
            leases = (await late.metrics()).total("replica_leases")
            return len(reported) == 2 and reported == heard and leases == len(clients)

        await eventually(partial(late.serves, 2))
        await eventually(knows_it_all)
        idler = min(found := await active_blocks(late), key=found.__getitem__)
        short = StreamingClient(late, prompt=SHORT_PROMPT, max_tokens=2)
        assert (await short.end()).is_whole, short.error
        assert str((await short.workers())["decode"]) == idler, f"it has the least load: {found}"

        await first.kill()
        killed_s = time.monotonic()
        await asyncio.gather(*(client.end() for client in clients))

        async def counts_nothing() -> bool:
            return not await active_blocks(late) and not (await late.metrics()).total("replica_leases")

        await eventually(counts_nothing)
        record_property("load of the dead was dropped after, s", time.monotonic() - killed_s)
        metrics = await late.metrics()
        assert metrics.total("replica_sync_events_total", outcome="replica_lost") >= 1
        assert metrics.total("replicas") == 0
        await wait_until_consistent(processes, [late], workers=2)
