"""The NATS Core event plane: a server that goes and comes back, damaged messages, limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from kvrouter.core.events import Held, KvBatch, KvSnapshot, Stored, pack_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.nats import NatsEventPublisher
from kvrouter.transports.events.port import DropReason
from kvrouter.transports.events.subjects import events_subject, loads_subject, recovery_subject
from kvrouter.worker import KvPublisher
from tests.testing.event_transports import TOKEN, NatsTransport, card, connect, until_delivered
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until

RANK = WorkerRank(WorkerId(4), DpRank(0))
EPOCH = Epoch(7)
COLUMN = pack_hashes([1])
STORED = Stored(None, COLUMN, COLUMN)


def batch(first: int) -> KvBatch:
    return KvBatch(RANK, EPOCH, EventId(first), (STORED,))


class Answers:
    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return batch(first)

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return KvSnapshot(rank, EPOCH, EventId(0), ())


@asynccontextmanager
async def two_ends(server: NatsServer) -> AsyncIterator[NatsTransport]:
    worker, router = await connect(server.url), await connect(server.url)
    transport = NatsTransport(worker, router, f"test-{uuid4().hex}")
    try:
        await transport.subscriber.start()
        await until_delivered(transport.publisher, transport.subscriber, RANK.worker_id)
        yield transport
    finally:
        await transport.close()
        await worker.close()
        await router.close()


async def test_events_published_while_nats_is_down_are_dropped_and_counted(own_nats: NatsServer) -> None:
    async with two_ends(own_nats) as transport:
        heard: list[KvBatch] = []
        transport.subscriber.subscribe(heard.append, lambda _report: None)
        transport.serve_recovery(RANK.worker_id, Answers())
        own_nats.kill()
        await until(lambda: not transport.worker.is_connected)
        for number in range(10_000):
            transport.publisher.publish(batch(number))
        await until(lambda: transport.n_dropped() == 10_000)
        assert {why for _, why in transport.dropped} == {"not connected to NATS"}
        assert await transport.subscriber.recover_snapshot(RANK) is None
        own_nats.start()
        await until(lambda: transport.worker.is_connected and transport.router.is_connected)
        await until_delivered(transport.publisher, transport.subscriber, RANK.worker_id)
        transport.publisher.publish(batch(10_000))
        await until(lambda: batch(10_000) in heard)
        assert await transport.subscriber.recover_range(RANK, EventId(3), EventId(3)) == batch(3)


async def test_outgoing_queue_is_bounded_while_the_server_does_not_read(own_nats: NatsServer) -> None:
    client = await connect(own_nats.url)
    dropped: list[str] = []
    publisher = NatsEventPublisher(
        client,
        namespace="n",
        component="c",
        token=TOKEN,
        queue_max_bytes=100_000,
        on_dropped=lambda _, why: dropped.append(why),
    )
    try:
        own_nats.pause()
        column = pack_hashes(range(500))
        large = KvBatch(RANK, EPOCH, EventId(0), (Stored(None, column, column),))
        async with asyncio.timeout(60.0):
            while not dropped:
                for _ in range(100):
                    publisher.publish(large)
                await asyncio.sleep(0)
        assert dropped == ["the queue to NATS is full"]
    finally:
        own_nats.resume()
        await publisher.close()
        await client.close()


async def test_index_is_correct_again_after_a_nats_outage(own_nats: NatsServer) -> None:
    """Stores and removals are lost with the connection; the next heartbeat reveals it."""
    async with two_ends(own_nats) as transport:
        index, slot = NativeBlockIndex(), Slot(0)
        ingest = EventIngest(index, transport.subscriber, ModelInstrumentation(Telemetry(), "m"))
        transport.subscriber.subscribe(ingest.on_batch, lambda _report: None)
        worker = KvPublisher(transport.publisher, worker_id=RANK.worker_id, epoch=EPOCH, block_size=1)
        transport.serve_recovery(RANK.worker_id, worker)
        ingest.joined(RANK, slot, EPOCH)
        worker.publish_stored([1, 2, 3], [11, 12, 13])
        await until(lambda: index.held(slot) == 3)
        own_nats.kill()
        await until(lambda: not (transport.worker.is_connected or transport.router.is_connected))
        worker.publish_removed([13])
        worker.publish_stored([4, 5, 6], [14, 15, 16], parent=EngineHash(12))
        worker.flush()
        assert transport.n_dropped() == 1
        assert index.held(slot) == 3
        own_nats.start()
        await until(lambda: transport.worker.is_connected and transport.router.is_connected)
        await until_delivered(transport.publisher, transport.subscriber, WorkerId(99))
        worker.heartbeat([RANK.dp_rank])
        await until(lambda: index.held(slot) == 5)
        assert [feed.state for _, feed in ingest.feeds()] == [FeedState.LIVE]
        ingest.close()


async def test_undecodable_messages_are_counted_and_ignored(shared_nats: NatsServer) -> None:
    async with two_ends(shared_nats) as transport:
        heard: list[KvBatch] = []
        loads: list[LoadReport] = []
        transport.subscriber.subscribe(heard.append, loads.append)
        transport.serve_recovery(RANK.worker_id, Answers())
        assert await transport.subscriber.recover_snapshot(RANK) is not None
        namespace = transport.namespace
        for subject in (
            events_subject(namespace, "backend", RANK),
            loads_subject(namespace, "backend", RANK),
            recovery_subject(namespace, RANK.worker_id),
        ):
            for damaged in (b"", b"\xc1", b"\x80", b"x" * 100_000):
                await transport.router.publish(subject, damaged, reply="nobody")
        await until(lambda: len(transport.malformed) == 12)
        transport.publisher.publish(batch(1))
        await until(lambda: heard == [batch(1)])
        assert loads == []
        assert await transport.subscriber.recover_snapshot(RANK) is not None


async def test_large_snapshot_arrives_and_an_absent_worker_gives_none(shared_nats: NatsServer) -> None:
    class Large(Answers):
        def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
            names = pack_hashes(range(400_000))
            return KvSnapshot(rank, EPOCH, EventId(0), (Held(names, names),))

    async with two_ends(shared_nats) as transport:
        end = transport.serve_recovery(RANK.worker_id, Large())
        snapshot = await transport.subscriber.recover_snapshot(RANK)
        assert snapshot is not None
        assert sum(held.n_blocks for held in snapshot.events) == 400_000
        end()
        await asyncio.sleep(0)
        await transport.worker.flush()
        assert await transport.subscriber.recover_snapshot(RANK) is None
        assert await transport.subscriber.recover_range(RANK, EventId(0), EventId(0)) is None


async def test_event_over_the_server_size_limit_is_dropped_and_counted(shared_nats: NatsServer) -> None:
    async with two_ends(shared_nats) as transport:
        heard: list[KvBatch] = []
        transport.subscriber.subscribe(heard.append, lambda _report: None)
        column = pack_hashes(range(transport.worker.max_payload // 16))
        transport.publisher.publish(
            KvBatch(RANK, EPOCH, EventId(0), (STORED, Stored(None, column, column), STORED))
        )
        await until(lambda: EventId(3) in [sent.next_event_id for sent in heard])
        assert transport.n_dropped() == 1
        assert "too large" in transport.dropped[0][1]
        assert [sent.first_event_id for sent in heard] == [0, 2]


@pytest.mark.parametrize(("name", "token"), [("a.b", "a_b"), (">", "_"), ("*", "_"), ("a b\r\n", "a_b__")])
def test_special_characters_in_names_are_replaced_in_subjects(name: str, token: str) -> None:
    assert events_subject(name, name, RANK) == f"kvrouter.{token}.{token}.events.4.0"
    assert recovery_subject(name, RANK.worker_id) == f"kvrouter.{token}.recovery.4"


async def test_events_and_recovery_do_not_cross_namespaces(shared_nats: NatsServer) -> None:
    async with two_ends(shared_nats) as here, two_ends(shared_nats) as there:
        heard: list[KvBatch] = []
        here.subscriber.subscribe(heard.append, lambda _report: None)
        there.serve_recovery(RANK.worker_id, Answers())
        there.publisher.publish(batch(1))
        await until_delivered(there.publisher, there.subscriber, RANK.worker_id)
        here.publisher.publish(batch(2))
        await until(lambda: heard == [batch(2)])
        assert await here.subscriber.recover_snapshot(RANK) is None


async def test_events_of_a_followed_worker_under_another_component_are_refused(
    shared_nats: NatsServer,
) -> None:
    async with two_ends(shared_nats) as transport:
        heard: list[object] = []
        transport.subscriber.subscribe(heard.append, heard.append)
        unfollow_older = transport.subscriber.follow(card(RANK.worker_id, EventSource(EventTransport.NATS)))
        unfollow = transport.subscriber.follow(card(RANK.worker_id, EventSource(EventTransport.NATS)))
        unfollow_older()
        client = transport.worker
        other = NatsEventPublisher(client, namespace=transport.namespace, component="prefill", token=TOKEN)
        report = LoadReport(RANK, 1, 100)
        other.publish(batch(1))
        other.publish_load(report)
        await until(lambda: len(transport.foreign) == 2)
        assert {error.reason for error in transport.foreign} == {DropReason.OTHER_COMPONENT}
        transport.publisher.publish(batch(2))
        await until(lambda: bool(heard))
        assert heard == [batch(2)]
        unfollow()
        other.publish(batch(3))
        await until(lambda: len(heard) == 2)
        await other.close()
