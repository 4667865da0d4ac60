"""A worker's engine door, and an index that hears what comes through it."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.core.events import Held, KvBatch, Medium, unpack_hashes
from kvrouter.core.ids import DpRank, Epoch, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.worker import EngineDoor, KvPublisher
from tests.oracles.index import NaiveBlockIndex

BLOCK_SIZE = 4
TOKEN = "a secret"
WORKER = WorkerId(7)
DP_RANKS = (DpRank(0), DpRank(1))

BlockCounts = Counter[tuple[Medium, int, int]]
"""(medium, engine hash, sequence hash), as often as it was stored."""


def block_counts(held: tuple[Held, ...]) -> BlockCounts:
    """What a dump or a snapshot lists."""
    return Counter(
        (event.medium, name, sequence)
        for event in held
        for name, sequence in zip(
            unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), strict=True
        )
    )


class EngineDoorHarness:
    """What is known of the ranks behind the door."""

    def __init__(self, address: str, *, token: str = TOKEN, silence_s: float = 30.0) -> None:
        events = MemoryEventTransport()
        self.batches: list[KvBatch] = []
        self.loads: list[LoadReport] = []
        self.index = NaiveBlockIndex()
        self.orphaned = 0
        self.publisher = KvPublisher(events, worker_id=WORKER, epoch=Epoch(1), block_size=BLOCK_SIZE)
        self.door = EngineDoor(
            self.publisher,
            address=address,
            block_size=BLOCK_SIZE,
            token=token,
            dp_ranks=DP_RANKS,
            silence_s=silence_s,
        )
        events.subscribe(self._on_batch, self.loads.append)

    def _on_batch(self, batch: KvBatch) -> None:
        self.batches.append(batch)
        self.orphaned += self.index.apply(Slot(batch.rank.dp_rank), batch.events).orphaned

    def believed(self, dp_rank: DpRank) -> BlockCounts:
        """What a router that heard everything believes."""
        return block_counts(tuple(self.index.dump(Slot(dp_rank))))

    def answered(self, dp_rank: DpRank) -> BlockCounts:
        """What the worker answers to a router that heard nothing."""
        snapshot = self.publisher.recover_snapshot(WorkerRank(WORKER, dp_rank))
        assert snapshot is not None
        return block_counts(snapshot.events)


@asynccontextmanager
async def open_engine_door(
    address: str, *, token: str = TOKEN, silence_s: float = 30.0
) -> AsyncIterator[EngineDoorHarness]:
    """The door is open."""
    harness = EngineDoorHarness(address, token=token, silence_s=silence_s)
    await harness.door.start()
    try:
        yield harness
    finally:
        await harness.door.stop()
