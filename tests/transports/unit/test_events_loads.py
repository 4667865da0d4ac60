"""Load reports on their way out: the newest of each rank, a few times a second."""

import asyncio

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.loads import LatestLoads
from tests.testing.virtual_time import run_in_virtual_time


def report(active_blocks: int, dp_rank: int = 0) -> LoadReport:
    return LoadReport(WorkerRank(WorkerId(1), DpRank(dp_rank)), active_blocks, 100)


def test_first_load_is_sent_at_once_then_the_newest_of_each_rank() -> None:
    async def run() -> None:
        sent: list[tuple[float, LoadReport]] = []
        loop = asyncio.get_running_loop()
        loads = LatestLoads(lambda load: sent.append((loop.time(), load)), interval_s=1.0)
        for active_blocks in range(4):
            for dp_rank in (0, 1):
                loads.publish(report(active_blocks, dp_rank))
        await asyncio.sleep(10.0)
        assert sent == [(0.0, report(0)), (1.0, report(3, 1)), (1.0, report(3))]
        loads.publish(report(9))
        assert sent[-1] == (10.0, report(9))
        loads.publish(report(10))
        loads.close()
        await asyncio.sleep(10.0)
        assert len(sent) == 4, "closed"

    run_in_virtual_time(run())
