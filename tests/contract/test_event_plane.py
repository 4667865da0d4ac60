"""What every event plane promises to workers and routers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from kvrouter.core.columns import pack_hashes
from kvrouter.core.events import KvBatch, KvSnapshot, Stored
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.planes.events.memory import MemoryEventPlane
from kvrouter.planes.events.port import EventPublisher, EventSubscriber

RANK = WorkerRank(WorkerId(4), DpRank(1))
OTHER = WorkerRank(WorkerId(5), DpRank(0))
EPOCH = Epoch(77)


def batch(first: int, n: int = 1, rank: WorkerRank = RANK) -> KvBatch:
    column = pack_hashes([1])
    return KvBatch(rank, EPOCH, EventId(first), (Stored(None, column, column),) * n)


@dataclass
class Source:
    """A worker that has everything, or nothing any more."""

    has: bool = True
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        self.asked.append((rank, first, last))
        return batch(first, last - first + 1, rank) if self.has else None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        self.asked.append((rank,))
        return KvSnapshot(rank, EPOCH, EventId(9), ()) if self.has else None


class Ends(Protocol):
    """Both ends of one plane, as a test needs them."""

    publisher: EventPublisher
    subscriber: EventSubscriber

    def serve_recovery(self, worker_id: WorkerId, source: Source) -> Callable[[], None]: ...


class MemoryEnds:
    def __init__(self) -> None:
        self.plane = MemoryEventPlane()
        self.publisher: EventPublisher = self.plane
        self.subscriber: EventSubscriber = self.plane

    def serve_recovery(self, worker_id: WorkerId, source: Source) -> Callable[[], None]:
        return self.plane.serve_recovery(worker_id, source)


@pytest.fixture(params=[MemoryEnds])
def ends(request: pytest.FixtureRequest) -> Ends:
    made: Ends = request.param()
    return made


class Received:
    def __init__(self, ends: Ends) -> None:
        self.batches: list[KvBatch] = []
        self.loads: list[LoadReport] = []
        self.end = ends.subscriber.subscribe(self.batches.append, self.loads.append)


async def test_every_subscriber_gets_every_batch_in_order(ends: Ends) -> None:
    first, second = Received(ends), Received(ends)
    for event_id in range(5):
        ends.publisher.publish(batch(event_id))
    assert first.batches == second.batches == [batch(event_id) for event_id in range(5)]


async def test_a_batch_without_events_arrives_too(ends: Ends) -> None:
    received = Received(ends)
    ends.publisher.publish(batch(3, 0))
    assert received.batches == [batch(3, 0)]


async def test_the_newest_load_arrives(ends: Ends) -> None:
    received = Received(ends)
    for active_blocks in (1, 2, 3):
        ends.publisher.publish_load(LoadReport(RANK, active_blocks, 100))
    assert received.loads[-1] == LoadReport(RANK, 3, 100)


async def test_what_has_ended_gets_nothing_and_may_end_twice(ends: Ends) -> None:
    ended, stays = Received(ends), Received(ends)
    ended.end()
    ended.end()
    ends.publisher.publish(batch(0))
    assert (ended.batches, stays.batches) == ([], [batch(0)])


async def test_a_subscriber_may_end_another_while_a_batch_is_delivered(ends: Ends) -> None:
    later: list[Received] = []

    def end_later(_batch: KvBatch) -> None:
        later[0].end()

    ends.subscriber.subscribe(end_later, lambda _report: None)
    later.append(Received(ends))
    ends.publisher.publish(batch(0))
    ends.publisher.publish(batch(1))
    assert batch(1) not in later[0].batches


async def test_publishing_to_nobody_is_no_error(ends: Ends) -> None:
    ends.publisher.publish(batch(0))
    ends.publisher.publish_load(LoadReport(RANK, 0, 1))


async def test_recovery_is_answered_by_the_worker_itself(ends: Ends) -> None:
    source = Source()
    ends.serve_recovery(RANK.worker_id, source)
    assert await ends.subscriber.recover_range(RANK, EventId(2), EventId(4)) == batch(2, 3)
    assert await ends.subscriber.recover_snapshot(RANK) == KvSnapshot(RANK, EPOCH, EventId(9), ())
    assert source.asked == [(RANK, 2, 4), (RANK,)]


async def test_no_worker_and_no_history_are_none(ends: Ends) -> None:
    ends.serve_recovery(RANK.worker_id, Source(has=False))
    for rank in (RANK, OTHER):
        assert await ends.subscriber.recover_range(rank, EventId(0), EventId(0)) is None
        assert await ends.subscriber.recover_snapshot(rank) is None


async def test_a_newer_start_of_a_worker_answers_and_the_older_one_leaves_it_alone(ends: Ends) -> None:
    older, newer = Source(), Source()
    end_older = ends.serve_recovery(RANK.worker_id, older)
    end_newer = ends.serve_recovery(RANK.worker_id, newer)
    end_older()
    assert await ends.subscriber.recover_snapshot(RANK) is not None
    assert (older.asked, newer.asked) == ([], [(RANK,)])
    end_newer()
    assert await ends.subscriber.recover_snapshot(RANK) is None
