"""Workers that were admitted and lie: what they say of others does not count, of themselves has bounds."""

from typing import Any

from kvrouter.core.columns import pack_hashes
from kvrouter.core.events import Cleared, KvBatch, Stored
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from tests.hostile.liar import LIAR, admitted
from tests.support.processes import Frontend, eventually, fleet
from tests.support.served import words

TOKEN = "the token of the fleet"
PLANES = {"KVROUTER_PLANE_TOKEN": TOKEN, "DYN_EVENT_PLANE": "zmq"}


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


async def test_an_admitted_worker_empties_nobody_elses_index_and_reports_nobody_elses_load() -> None:
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
            for first in range(64):
                liar.say(KvBatch(victim, epoch, EventId(first), (Cleared(), Stored(None, column, column))))
            liar.say_load(LoadReport(victim, active_blocks=9_999, total_blocks=9_999))

            async def were_let_go() -> bool:
                return (await frontend.metrics()).total("events_foreign_total", plane="zmq") == 65

            await eventually(were_let_go)
            assert await is_live(frontend, 1, 70)
            assert (await worker_of(frontend, 1))["ranks"][0]["total_blocks"] != 9_999
            assert frontend.lines().count("events_foreign") == 1, "told once a minute"
