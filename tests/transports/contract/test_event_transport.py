"""What every event plane promises to workers and routers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from uuid import uuid4

import pytest

from kvrouter.core.events import Cleared, Held, KvBatch, KvSnapshot, Medium, Removed, Stored, pack_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.port import DropReason, ForeignRank
from tests.testing.event_transports import EVENT_TRANSPORTS, EventTransportSetup
from tests.testing.waits import until

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
    held: tuple[Held, ...] = ()
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        self.asked.append((rank, first, last))
        return batch(first, last - first + 1, rank) if self.has else None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        self.asked.append((rank,))
        return KvSnapshot(rank, EPOCH, EventId(9), self.held) if self.has else None


@pytest.fixture(params=list(EVENT_TRANSPORTS))
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[EventTransportSetup]:
    kind = EVENT_TRANSPORTS[request.param]
    url = request.getfixturevalue("shared_nats").url if kind.needs_nats else ""
    async with kind.open(url, f"test-{uuid4().hex}") as opened:
        yield opened


class Received:
    def __init__(self, transport: EventTransportSetup) -> None:
        self.batches: list[KvBatch] = []
        self.loads: list[LoadReport] = []
        self.end = transport.subscriber.subscribe(self.batches.append, self.loads.append)


async def test_every_subscriber_gets_every_batch_in_order(transport: EventTransportSetup) -> None:
    first, second = Received(transport), Received(transport)
    for event_id in range(5):
        transport.publisher.publish(batch(event_id))
    await until(lambda: len(first.batches) == len(second.batches) == 5)
    assert first.batches == second.batches == [batch(event_id) for event_id in range(5)]


async def test_every_kind_of_event_arrives_unchanged(transport: EventTransportSetup) -> None:
    received = Received(transport)
    hashes, largest = pack_hashes([1, 2**64 - 1]), EngineHash(2**64 - 1)
    sent = KvBatch(
        RANK,
        EPOCH,
        EventId(2**40),
        (Stored(largest, hashes, hashes, Medium.DISK), Removed(hashes, Medium.CPU), Cleared()),
        1.5,
    )
    transport.publisher.publish(sent)
    await until(lambda: bool(received.batches))
    assert received.batches == [sent]


async def test_empty_batch_arrives(transport: EventTransportSetup) -> None:
    received = Received(transport)
    transport.publisher.publish(batch(3, 0))
    await until(lambda: bool(received.batches))
    assert received.batches == [batch(3, 0)]


async def test_large_batch_arrives_whole_or_in_parts(transport: EventTransportSetup) -> None:
    received = Received(transport)
    column = pack_hashes(range(5_000))
    large = KvBatch(RANK, EPOCH, EventId(7), (Stored(None, column, column),) * 60)
    transport.publisher.publish(large)
    await until(lambda: sum(len(part.events) for part in received.batches) == 60)
    next_id = 7
    for part in received.batches:
        assert (part.rank, part.epoch, part.first_event_id) == (RANK, EPOCH, next_id)
        next_id = part.next_event_id
    assert tuple(event for part in received.batches for event in part.events) == large.events


async def test_the_newest_load_of_each_rank_arrives(transport: EventTransportSetup) -> None:
    received = Received(transport)
    for active_blocks in (1, 2, 3):
        for rank in (RANK, OTHER):
            transport.publisher.publish_load(LoadReport(rank, active_blocks, 100))
    newest = {RANK: 3, OTHER: 3}
    await until(lambda: {load.rank: load.active_blocks for load in received.loads} == newest)


async def test_ended_subscriber_gets_nothing_and_may_end_twice(transport: EventTransportSetup) -> None:
    ended, stays = Received(transport), Received(transport)
    ended.end()
    ended.end()
    transport.publisher.publish(batch(0))
    await until(lambda: bool(stays.batches))
    assert (ended.batches, stays.batches) == ([], [batch(0)])


async def test_a_subscriber_may_end_another_while_a_batch_is_delivered(
    transport: EventTransportSetup,
) -> None:
    seen: list[KvBatch] = []
    later: list[Received] = []

    def end_later(batch: KvBatch) -> None:
        seen.append(batch)
        later[0].end()

    transport.subscriber.subscribe(end_later, lambda _report: None)
    later.append(Received(transport))
    transport.publisher.publish(batch(0))
    transport.publisher.publish(batch(1))
    await until(lambda: len(seen) == 2)
    assert batch(1) not in later[0].batches


@pytest.mark.parametrize("name", [name for name, kind in EVENT_TRANSPORTS.items() if kind.has_channels])
async def test_batch_or_load_from_another_worker_is_refused(
    name: str, request: pytest.FixtureRequest
) -> None:
    kind = EVENT_TRANSPORTS[name]
    url = request.getfixturevalue("shared_nats").url if kind.needs_nats else ""
    async with kind.open(url, f"test-{uuid4().hex}") as transport:
        received = Received(transport)
        cleared = KvBatch(RANK, EPOCH, EventId(1), (Cleared(),))
        await transport.lie(OTHER, batch=cleared, load=LoadReport(RANK, 99, 100))
        await until(lambda: len(transport.foreign) == 2)
        transport.publisher.publish(batch(0))
        transport.publisher.publish_load(LoadReport(RANK, 1, 100))
        await until(lambda: bool(received.batches and received.loads))
        assert (received.batches, received.loads) == ([batch(0)], [LoadReport(RANK, 1, 100)])
        assert all(str(RANK) in error.message for error in transport.foreign)
        assert {error.reason for error in transport.foreign} == {DropReason.OTHER_WORKER}


class Impostor(Source):
    """Answers with what it knows of another worker's rank."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return super().recover_range(OTHER, first, last)

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return super().recover_snapshot(OTHER)


async def test_recovery_answer_for_another_rank_is_refused(transport: EventTransportSetup) -> None:
    transport.serve_recovery(RANK.worker_id, Impostor())
    with pytest.raises(ForeignRank):
        await transport.subscriber.recover_range(RANK, EventId(2), EventId(4))
    with pytest.raises(ForeignRank):
        await transport.subscriber.recover_snapshot(RANK)


async def test_publishing_without_subscribers_does_not_fail(transport: EventTransportSetup) -> None:
    transport.publisher.publish(batch(0))
    transport.publisher.publish_load(LoadReport(RANK, 0, 1))


async def test_recovery_request_is_answered_by_the_worker(transport: EventTransportSetup) -> None:
    source = Source()
    transport.serve_recovery(RANK.worker_id, source)
    assert await transport.subscriber.recover_range(RANK, EventId(2), EventId(4)) == batch(2, 3)
    assert await transport.subscriber.recover_snapshot(RANK) == KvSnapshot(RANK, EPOCH, EventId(9), ())
    assert source.asked == [(RANK, 2, 4), (RANK,)]


async def test_large_snapshot_arrives_whole(
    transport: EventTransportSetup,
) -> None:
    names = pack_hashes(range(300_000))
    held = (Held(names, names), Held(names, names, Medium.CPU))
    transport.serve_recovery(RANK.worker_id, Source(held=held))
    snapshot = await transport.subscriber.recover_snapshot(RANK)
    assert snapshot == KvSnapshot(RANK, EPOCH, EventId(9), held)


async def test_recovery_returns_none_without_worker_or_history(transport: EventTransportSetup) -> None:
    transport.serve_recovery(RANK.worker_id, Source(has=False))
    for rank in (RANK, OTHER):
        assert await transport.subscriber.recover_range(rank, EventId(0), EventId(0)) is None
        assert await transport.subscriber.recover_snapshot(rank) is None


async def test_recovery_is_answered_by_newer_start_after_older_one_ends(
    transport: EventTransportSetup,
) -> None:
    older, newer = Source(), Source()
    end_older = transport.serve_recovery(RANK.worker_id, older)
    end_newer = transport.serve_recovery(RANK.worker_id, newer)
    end_older()
    assert await transport.subscriber.recover_snapshot(RANK) is not None
    assert (older.asked, newer.asked) == ([], [(RANK,)])
    end_newer()
    await asyncio.sleep(0.05)  # a question that overtakes the end on the way may wait for its answer in vain
    assert await transport.subscriber.recover_snapshot(RANK) is None
