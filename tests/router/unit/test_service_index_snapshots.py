"""Which ranks go into a snapshot of the index, and what becomes of one that fails."""

from collections.abc import Sequence

import pytest

from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import Cleared, Held, KvBatch, KvSnapshot, Stored, pack_hashes
from kvrouter.core.hashing import sequence_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.index_snapshots import IndexSnapshots
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.events.port import SnapshotFailed
from tests.testing.waits import until

RANKS = [WorkerRank(WorkerId(number), DpRank(0)) for number in range(3)]
BLOCKS = pack_hashes([11, 12])


class Taking:
    def __init__(self, store: "Store") -> None:
        self.added: list[KvSnapshot] = []
        self.end = ""
        self._store = store

    def covers(self, rank: WorkerRank) -> bool:
        return rank not in self._store.uncovered

    async def add(self, snapshot: KvSnapshot) -> None:
        if self._store.fails:
            raise SnapshotFailed("no room")
        self.added.append(snapshot)
        for act in self._store.meanwhile:
            act()

    async def commit(self) -> None:
        self.end = "committed"

    async def abandon(self) -> None:
        self.end = "abandoned"


class Store:
    def __init__(self) -> None:
        self.fails = False
        self.is_held = False
        self.uncovered: set[WorkerRank] = set()
        self.meanwhile: list = []  # type: ignore[type-arg]
        self.taken: list[Taking] = []
        self.asked: list[int] = []

    async def overdue(self, *, messages_max: int) -> Sequence[str]:
        self.asked.append(messages_max)
        return ["backend"]

    async def take(self, component: str) -> Taking | None:
        if self.is_held:
            return None
        self.taken.append(Taking(self))
        return self.taken[-1]


class Answers(MemoryEventTransport):
    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        held = Held(BLOCKS, sequence_hashes(BLOCKS))
        return KvSnapshot(rank, Epoch(5), EventId(2), (held,))


class Bench:
    def __init__(self) -> None:
        self.store = Store()
        self.index = NativeBlockIndex()
        self.ingest = EventIngest(self.index, Answers(), ModelInstrumentation(Telemetry(), "m"))
        self.snapshots = IndexSnapshots(
            self.store,
            lambda: [EventCacheView(self.index, self.ingest, NativeApproximateIndex())],
            messages_max=9,
        )

    async def live(self) -> "Bench":
        for slot, rank in enumerate(RANKS):
            self.ingest.joined(rank, Slot(slot), Epoch(5))
        await until(lambda: all(feed.state is FeedState.LIVE for _, feed in self.ingest.feeds()))
        return self

    def batch(self, rank: WorkerRank, first: int) -> KvBatch:
        return KvBatch(rank, Epoch(5), EventId(first), (Stored(None, pack_hashes([13]), pack_hashes([13])),))


async def test_every_live_rank_is_stored_at_its_current_event_id() -> None:
    bench = await Bench().live()
    bench.ingest.on_batch(bench.batch(RANKS[1], 2))
    assert await bench.snapshots.check() == 1
    (taking,) = bench.store.taken
    assert (taking.end, bench.store.asked) == ("committed", [9])
    assert [(snapshot.rank, snapshot.next_event_id) for snapshot in taking.added] == [
        (RANKS[0], 2),
        (RANKS[1], 3),
        (RANKS[2], 2),
    ]
    assert [sum(held.n_blocks for held in snapshot.events) for snapshot in taking.added] == [2, 3, 2]


async def test_ranks_with_a_gap_or_not_covered_are_not_stored() -> None:
    bench = await Bench().live()
    bench.ingest.on_batch(bench.batch(RANKS[0], 7))  # a gap
    bench.store.uncovered.add(RANKS[2])
    assert await bench.snapshots.check() == 1
    (taking,) = bench.store.taken
    assert [snapshot.rank for snapshot in taking.added] == [RANKS[1]]
    bench.ingest.close()


async def test_ranks_changing_during_a_snapshot_are_stored_as_changed() -> None:
    bench = await Bench().live()

    def meanwhile() -> None:
        bench.store.meanwhile.clear()
        bench.ingest.on_batch(KvBatch(RANKS[1], Epoch(5), EventId(2), (Cleared(),)))
        bench.ingest.freed(Slot(2))

    bench.store.meanwhile.append(meanwhile)
    assert await bench.snapshots.check() == 1
    (taking,) = bench.store.taken
    assert [(snapshot.rank, snapshot.next_event_id, len(snapshot.events)) for snapshot in taking.added] == [
        (RANKS[0], 2, 1),
        (RANKS[1], 3, 0),
    ]


async def test_a_slot_reused_during_a_snapshot_is_not_stored_as_its_old_rank() -> None:
    bench = await Bench().live()
    other = WorkerRank(WorkerId(9), DpRank(0))

    def meanwhile() -> None:
        bench.store.meanwhile.clear()
        bench.ingest.freed(Slot(2))
        bench.ingest.joined(other, Slot(2), Epoch(5))

    bench.store.meanwhile.append(meanwhile)
    assert await bench.snapshots.check() == 1
    (taking,) = bench.store.taken
    assert RANKS[2] not in [snapshot.rank for snapshot in taking.added]
    bench.ingest.close()


async def test_an_empty_index_abandons_its_snapshot() -> None:
    bench = Bench()
    assert await bench.snapshots.check() == 0
    assert [taking.end for taking in bench.store.taken] == ["abandoned"]


async def test_a_failed_snapshot_is_abandoned_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = await Bench().live()
    bench.store.fails = True
    assert await bench.snapshots.check() == 0
    assert [taking.end for taking in bench.store.taken] == ["abandoned"]
    assert "index_not_stored" in caplog.text


async def test_a_snapshot_held_by_another_replica_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    bench = await Bench().live()
    bench.store.is_held = True
    assert await bench.snapshots.check() == 0
    assert "index_not_stored" not in caplog.text


async def test_snapshots_are_checked_repeatedly_until_stopped() -> None:
    bench = await Bench().live()
    snapshots = IndexSnapshots(bench.store, lambda: [], messages_max=1, check_s=0.001)
    snapshots.start()
    snapshots.start()
    await until(lambda: len(bench.store.asked) >= 3)
    await snapshots.stop()
    await snapshots.stop()


async def test_an_unreachable_snapshot_store_is_asked_again() -> None:
    bench = await Bench().live()
    trouble: list[KvrouterError] = [SnapshotFailed("no way")]
    overdue = bench.store.overdue

    async def sometimes(*, messages_max: int) -> Sequence[str]:
        if trouble:
            raise trouble.pop()
        return await overdue(messages_max=messages_max)

    bench.store.overdue = sometimes  # type: ignore[method-assign]
    assert await bench.snapshots.check() == 0
    assert await bench.snapshots.check() == 1
