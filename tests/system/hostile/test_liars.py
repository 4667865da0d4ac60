"""Workers that were admitted and lie: what they say of others does not count, of themselves has bounds."""

import asyncio
from typing import Any

import numpy as np

from kvrouter.core.events import Cleared, KvBatch, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, ModelRuntimeConfig
from tests.system.hostile.bystanders import ASK_EVERY_S
from tests.system.hostile.liar import LIAR, Liar, admitted
from tests.system.hostile.meter import MIB, Meter
from tests.testing.mock_server import words
from tests.testing.processes import Frontend, eventually, fleet

TOKEN = "the token of the fleet"
PLANES = {"KVROUTER_PLANE_TOKEN": TOKEN, "DYN_EVENT_PLANE": "zmq"}

CPU_MAX_S = 3.0
"""Of the frontend's event loop for all lies of one test: 0.1 s were seen, and 0.4 s on a busy machine. The
blocks that one of them tells of would take 7 s.
"""


async def worker_of(frontend: Frontend, worker_id: int) -> Any:
    """What the frontend tells of a worker; None while it does not know it."""
    workers = (await frontend.fleet())["workers"]
    return next((worker for worker in workers if worker["worker_id"] == worker_id), None)


async def is_live(frontend: Frontend, worker_id: int, blocks: int) -> bool:
    """Whether the index has so many blocks of the worker's rank 0, for sure."""
    worker = await worker_of(frontend, worker_id)
    if worker is None or worker["ranks"][0]["feed"] is None:
        return False
    rank = worker["ranks"][0]
    return (rank["feed"]["state"], rank["index_blocks"]) == ("live", blocks)


async def test_a_lying_worker_cannot_change_another_workers_index_or_load() -> None:
    async with fleet(PLANES) as processes:
        running = await processes.worker("--worker-id", "1")
        frontend = await processes.frontend()
        body = {"model": "mock", "prompt": words(n=70 * 64), "max_tokens": 1}

        async def is_answered() -> bool:
            return (await frontend.http.post("/v1/completions", json=body)).status_code == 200

        await eventually(is_answered)
        await eventually(lambda: is_live(frontend, 1, 70))
        victim = WorkerRank(WorkerId(1), DpRank(0))
        epoch = Epoch(int(running.ready["address"].rpartition("/")[2]))
        async with admitted(processes) as liar:
            await eventually(lambda: is_live(frontend, LIAR, 0))
            column = pack_hashes([7])
            meter = Meter(frontend.pid)
            loop = asyncio.get_running_loop()
            began_s, before_s = loop.time(), meter.loop_cpu_s()
            for first in range(64):
                liar.say(KvBatch(victim, epoch, EventId(first), (Cleared(), Stored(None, column, column))))
            liar.say_load(LoadReport(victim, active_blocks=9_999, total_blocks=9_999))

            async def were_let_go() -> bool:
                return (await frontend.metrics()).total(
                    "events_dropped_total", plane="zmq", reason="other_worker"
                ) == 65

            await eventually(were_let_go)
            assert meter.loop_cpu_s() - before_s < CPU_MAX_S
            assert await is_live(frontend, 1, 70)
            assert (await worker_of(frontend, 1))["ranks"][0]["total_blocks"] != 9_999
            await frontend.has_logged("events_foreign")
            n_logged = frontend.lines().count("events_foreign")
            assert 1 <= n_logged <= 1 + (loop.time() - began_s) / 60.0, "logged once a minute"


async def test_a_worker_reporting_more_blocks_than_its_card_blocks_no_other() -> None:
    """Sixty times 200,000 blocks for a card of 16,384: one batch each, as fast as they travel, once a
    load report has named as many as all of them.
    """
    async with fleet(PLANES) as processes:
        await processes.worker("--worker-id", "1")
        frontend = await processes.frontend()
        config = ModelRuntimeConfig(total_kv_blocks=16_384)
        async with admitted(processes, runtime_config=config) as liar:
            await eventually(lambda: is_live(frontend, LIAR, 0))
            liar.say_load(LoadReport(liar.rank, active_blocks=0, total_blocks=12_000_000))

            async def is_load_known() -> bool:
                (rank,) = (await worker_of(frontend, LIAR))["ranks"]
                return bool(rank["total_blocks"] == 12_000_000)

            await eventually(is_load_known)
            meter = Meter(frontend.pid)
            before_bytes, before_s = meter.resident_bytes(), meter.loop_cpu_s()
            reported = asyncio.create_task(tell_of_millions(liar))
            while not reported.done():
                assert (await frontend.http.get("/health")).status_code == 200
                await asyncio.sleep(ASK_EVERY_S)
            await reported

            async def is_over_limit() -> bool:
                worker = await worker_of(frontend, LIAR)
                rank = worker["ranks"][0]
                return (rank["feed"]["state"], rank["index_blocks"]) == ("over_limit", 0)

            await eventually(is_over_limit)
            assert meter.loop_cpu_s() - before_s < CPU_MAX_S
            assert meter.resident_bytes() - before_bytes < 200 * MIB
            metrics = await frontend.metrics()
            assert metrics.total("feed_state", worker=str(LIAR), state="over_limit") == 1
            assert metrics.total("feed_events_total", outcome="over_limit") == 1
            await frontend.has_logged("kv_events_over_limit")
            assert (await worker_of(frontend, 1))["ranks"][0]["feed"]["state"] == "live"


async def tell_of_millions(liar: Liar) -> None:
    names = np.random.default_rng(7)
    for event_id in range(60):
        columns = names.integers(0, 2**64, (2, 200_000), dtype=np.uint64)
        stored = Stored(None, columns[0].tobytes(), columns[1].tobytes())
        liar.say(KvBatch(liar.rank, liar.epoch, EventId(event_id), (stored,)))
        await asyncio.sleep(0.01)


async def test_a_false_card_does_not_change_the_calls_clients_may_make() -> None:
    """It says ``context_length: 1``, names a tokenizer that is none, and takes a name for its own."""
    body = {"model": "mock", "prompt": words(n=200), "max_tokens": 4}

    async def status(frontend: Frontend, **changed: object) -> int:
        return (await frontend.http.post("/v1/completions", json={**body, **changed})).status_code

    async with fleet(PLANES) as processes:
        await processes.worker("--worker-id", "1")
        frontend = await processes.frontend()

        async def is_served() -> bool:
            return await status(frontend) == 200

        await eventually(is_served)
        (before,) = (await frontend.http.get("/v1/models")).json()["data"]
        meter = Meter(frontend.pid)
        before_s, before_bytes = meter.loop_cpu_s(), meter.resident_bytes()
        lies = {"context_length": 1, "tokenizer": "/nowhere", "names": {"mock": "an-adapter"}}
        async with admitted(processes, **lies) as liar:

            async def is_known() -> bool:
                return await worker_of(frontend, LIAR) is not None

            await eventually(is_known)
            for _ in range(8):
                assert await status(frontend) == 200
            (during,) = (await frontend.http.get("/v1/models")).json()["data"]
            assert during["max_model_len"] == before["max_model_len"]
            await liar.grows(context_length=10**9)  # and now it can do everything
            for _ in range(8):
                assert await status(frontend) == 200, "nothing of what others can do is only its own"

            async def is_too_long() -> bool:
                return await status(frontend, prompt="a" * 59_000_000) == 413

            await eventually(is_too_long)
        for _ in range(8):
            assert await status(frontend) == 200
        longer = await status(frontend, max_tokens=before["max_model_len"])
        assert longer == 400, "the context is that of who is left"
        assert meter.loop_cpu_s() - before_s < CPU_MAX_S
        assert meter.resident_bytes() - before_bytes < 50 * MIB
