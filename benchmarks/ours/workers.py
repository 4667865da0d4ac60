"""The workers' ends of the planes, as far as the figures of the router alone need them."""

from collections.abc import Callable

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, WorkerRank
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.events.port import BatchSink, LoadSink
from kvrouter.transports.requests.port import EngineStream

EPOCH = Epoch(1)


class QuietWorkers:
    """The workers' end of the event plane: each held nothing when it was asked, and then publishes."""

    def __init__(self) -> None:
        self.publish: BatchSink = _unheard

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:  # noqa: ARG002
        self.publish = on_batch
        return lambda: None

    def follow(self, card: WorkerCard) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:  # noqa: ARG002
        return None

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:  # noqa: ARG002
        return KvSnapshot(rank, EPOCH, EventId(0), ())


class UnaskedWorker:
    """A worker that is there, and is only decided upon."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Raises RuntimeError."""
        raise RuntimeError(f"{request.engine_key}: nothing is sent while decisions are measured")


def _unheard(batch: KvBatch) -> None:
    raise RuntimeError(f"nobody subscribed before the batch of {batch.rank}")
