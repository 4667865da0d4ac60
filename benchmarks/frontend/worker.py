"""``python -m benchmarks.frontend.worker TICK_S WORKER_ID FOLDER [WORKERS [DP_SIZE]]``: engines that tick.

They take legs over tcp, announce themselves in the discovery of FOLDER, and publish nothing. Several workers
of one process are to a router like as many processes: each has sockets of its own. The first line on standard
output is a JSON object; all end with standard input.
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks.frontend.processes import say_and_wait
from benchmarks.frontend.ticker import TickingEngine
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, ModelName, WorkerId, WorkerRank
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.transports.events.zmq import ZmqEventPublisher
from kvrouter.transports.records.file import FileDiscovery
from kvrouter.transports.requests.port import RequestServer
from kvrouter.transports.requests.tcp import TcpRequestAcceptor
from kvrouter.transports.requests.worker_session import WorkerLimits

MODEL = ModelName("mock")
EPOCH = Epoch(1)
BLOCK_SIZE = 16
NAMESPACE = "default"
LEASE_S = 60.0
"""Long, so that renewing leases, which is the folder's work and not the router's, disturbs no figure."""


class HoldsNothing:
    """What a worker without blocks answers."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:  # noqa: ARG002
        return None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return KvSnapshot(rank, EPOCH, EventId(0), ())


async def main(tick_s: float, first: int, folder: Path, n_workers: int = 1, dp_size: int = 1) -> None:
    """Serve until standard input ends."""
    discovery = FileDiscovery(
        folder,
        namespace=NAMESPACE,
        on_trouble=lambda what, why: fail(f"{what}: {why}"),
        on_refused=lambda what, why: fail(f"{what}: {why}"),
        lease_s=LEASE_S,
    )
    async with AsyncExitStack() as stack:
        for worker in range(first, first + n_workers):
            card = await serve(stack, WorkerId(worker), TickingEngine(tick_s), dp_size=dp_size)
            await discovery.publish(card)
        await say_and_wait({"port": 0})
        await discovery.close()


async def serve(
    stack: AsyncExitStack,
    worker_id: WorkerId,
    engine: RequestServer,
    *,
    dp_size: int = 1,
    heartbeat_s: float = 2.0,
) -> WorkerCard:
    """Serve one worker until the stack ends; return its card."""
    acceptor = TcpRequestAcceptor(
        "127.0.0.1",
        token=None,
        limits=WorkerLimits(heartbeat_s=heartbeat_s, dead_after_s=3 * heartbeat_s),
        on_refused=fail,
    )
    await acceptor.start()
    stack.push_async_callback(acceptor.close)
    address = acceptor.address_of(worker_id, EPOCH)
    acceptor.serve(address, engine)
    events = ZmqEventPublisher("127.0.0.1", token=None, on_malformed=fail)
    stack.push_async_callback(events.close)
    events.serve_recovery(worker_id, HoldsNothing())
    return WorkerCard(
        worker_id=worker_id,
        incarnation=EPOCH,
        model=MODEL,
        role=Role.BOTH,
        block_size=BLOCK_SIZE,
        context_length=131_072,
        address=address,
        dp_size=dp_size,
        event_source=events.source,
        tokenizer="mock",
    )


def fail(why: str) -> None:
    """What nobody expects makes the figure worthless."""
    raise SystemExit(why)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:])))
