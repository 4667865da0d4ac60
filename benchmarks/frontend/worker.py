"""``python -m benchmarks.frontend.worker TICK_S WORKER_ID FOLDER``: a worker process whose engine only ticks.

It takes legs over tcp, announces itself in the discovery of FOLDER, and publishes nothing. Its first line on
standard output is a JSON object; it ends with its standard input.
"""

import sys
from pathlib import Path

import uvloop

from benchmarks.frontend.processes import say_and_wait
from benchmarks.frontend.ticker import TickingEngine
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, ModelName, WorkerId, WorkerRank
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.planes.discovery.file import FileDiscovery
from kvrouter.planes.events.zmq import ZmqEventPublisher
from kvrouter.planes.requests.tcp import TcpRequestAcceptor

MODEL = ModelName("mock")
EPOCH = Epoch(1)
BLOCK_SIZE = 16
NAMESPACE = "default"


class HoldsNothing:
    """What a worker without blocks answers."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:  # noqa: ARG002
        return None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return KvSnapshot(rank, EPOCH, EventId(0), ())


async def main(tick_s: float, worker_id: WorkerId, folder: Path) -> None:
    """Serve until standard input ends."""
    acceptor = TcpRequestAcceptor("127.0.0.1", token=None, on_refused=fail)
    await acceptor.start()
    address = acceptor.address_of(worker_id, EPOCH)
    place = acceptor.serve(address, TickingEngine(tick_s))
    events = ZmqEventPublisher("127.0.0.1", token=None, on_malformed=fail)
    events.serve_recovery(worker_id, HoldsNothing())
    discovery = FileDiscovery(
        folder, namespace=NAMESPACE, on_trouble=lambda what, why: fail(f"{what}: {why}")
    )
    card = WorkerCard(
        worker_id=worker_id,
        incarnation=EPOCH,
        model=MODEL,
        role=Role.BOTH,
        block_size=BLOCK_SIZE,
        context_length=131_072,
        address=address,
        event_source=events.source,
        tokenizer="mock",
    )
    await discovery.publish(card)
    await say_and_wait({"port": acceptor.port})
    await discovery.withdraw(worker_id, EPOCH)
    place.leave("the measurement is over")
    await discovery.close()
    await events.close()
    await acceptor.close()


def fail(why: str) -> None:
    """What nobody expects makes the figure worthless."""
    raise SystemExit(why)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), WorkerId(int(sys.argv[2])), Path(sys.argv[3])))
