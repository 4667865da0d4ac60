"""The zmq event plane: strangers, damaged frames, limits, and connections that break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvBatch, KvSnapshot, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, LoadReport
from kvrouter.transports.events.encoding import (
    BATCH_MAX_BYTES,
    VERSION,
    SnapshotQuestion,
    encode_batch,
    encode_question,
)
from kvrouter.transports.events.zmq import ZmqEventPublisher, ZmqEventSubscriber, publisher
from tests.testing.constants import SetConstants
from tests.testing.event_transports import card, until_delivered, waiting_libzmq
from tests.testing.waits import LIMIT_S, until

RANK, OTHER = (WorkerRank(WorkerId(number), DpRank(0)) for number in (4, 5))
EPOCH = Epoch(7)
SNAPSHOT = KvSnapshot(RANK, EPOCH, EventId(2), ())
TOPIC = bytes([VERSION]) + RANK.worker_id.to_bytes(8, "big")


def batch(first: int, rank: WorkerRank = RANK) -> KvBatch:
    return KvBatch(rank, EPOCH, EventId(first), ())


class Answers:
    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return SNAPSHOT


class Side:
    """A publisher or a subscriber, and what it could not read."""

    def __init__(self) -> None:
        self.malformed: list[str] = []


class Worker(Side):
    def __init__(self, *, token: str | None = None, port: int = 0, recovery_port: int = 0) -> None:
        super().__init__()
        self.dropped: list[str] = []
        self.plane = ZmqEventPublisher(
            "127.0.0.1",
            port,
            recovery_port=recovery_port,
            token=token,
            on_malformed=self.malformed.append,
            on_dropped=lambda _, why: self.dropped.append(why),
        )
        self.plane.serve_recovery(RANK.worker_id, Answers())


class Router(Side):
    def __init__(self, *, token: str | None = None, answer_timeout_s: float = 60.0) -> None:
        super().__init__()
        self.plane = ZmqEventSubscriber(
            token=token,
            answer_timeout_s=answer_timeout_s,
            on_malformed=self.malformed.append,
            on_foreign=lambda error: self.malformed.append(error.message),
        )
        self.batches: list[KvBatch] = []
        self.loads: list[LoadReport] = []
        self.plane.subscribe(self.batches.append, self.loads.append)


@asynccontextmanager
async def closing(*sides: Worker | Router) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for side in sides:
            await side.plane.close()


@pytest.mark.parametrize(
    ("worker_token", "stranger_token"), [("right", "wrong"), ("right", None), (None, "right")]
)
async def test_router_with_another_token_hears_nothing_and_gets_no_answer(
    worker_token: str | None, stranger_token: str | None
) -> None:
    worker, stranger = Worker(token=worker_token), Router(token=stranger_token, answer_timeout_s=0.3)
    friend = Router(token=worker_token)
    async with closing(worker, stranger, friend):
        stranger.plane.follow(card(4, worker.plane.source))
        friend.plane.follow(card(4, worker.plane.source))
        await until_delivered(worker.plane, friend.plane, RANK.worker_id)
        assert await stranger.plane.recover_snapshot(RANK) is None
        assert await friend.plane.recover_snapshot(RANK) == SNAPSHOT
        worker.plane.publish(batch(5))
        await until(lambda: batch(5) in friend.batches)
        assert stranger.batches == []
        assert worker.malformed == [], "refused before it was read"


async def test_events_of_a_process_count_only_for_workers_whose_cards_name_it() -> None:
    """It may send what nobody asked it for: here by libzmq's own option, to whoever did not subscribe."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    liar = context.socket(zmq.PUB)
    liar.linger = 0
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    honest = batch(3, OTHER)
    other_topic = bytes([VERSION]) + OTHER.worker_id.to_bytes(8, "big")
    worker, router = Worker(), Router()
    try:
        async with closing(worker, router):
            source = EventSource(
                EventTransport.ZMQ, events=f"tcp://127.0.0.1:{port}", recovery=worker.plane.source.recovery
            )
            router.plane.follow(card(4, worker.plane.source))
            router.plane.follow(card(5, source))
            await until_delivered(worker.plane, router.plane, RANK.worker_id)
            while honest not in router.batches:
                liar.send(other_topic + b"b" + encode_batch(honest))
                await asyncio.sleep(0.01)
            router.batches.clear()
            liar.setsockopt(zmq.INVERT_MATCHING, 1)
            liar.send(TOPIC + b"b" + encode_batch(batch(9)))
            liar.setsockopt(zmq.INVERT_MATCHING, 0)
            liar.send(other_topic + b"b" + encode_batch(honest))
            await until(lambda: honest in router.batches)
            assert batch(9) not in router.batches
    finally:
        liar.close()
        context.term()


async def test_undecodable_messages_are_counted_and_ignored() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.PUB)
    raw.linger = 0
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    worker, router = Worker(), Router()
    try:
        async with closing(worker, router):
            events = f"tcp://127.0.0.1:{port}"
            router.plane.follow(
                card(4, EventSource(EventTransport.ZMQ, events=events, recovery=worker.plane.source.recovery))
            )
            damaged = [b"", b"b", b"b\xc1", b"b" + encode_batch(batch(1))[:-1], b"l\x00", b"?x"]
            while len(router.batches) < 3:
                for message in (*damaged, b"b" + encode_batch(batch(9))):
                    raw.send(TOPIC + message)
                await asyncio.sleep(0.01)
            assert set(router.batches) == {batch(9)}
            assert len(router.malformed) >= 2 * len(damaged)
    finally:
        raw.close()
        context.term()


async def test_undecodable_question_does_not_affect_another_router() -> None:
    worker, router = Worker(), Router()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(worker.plane.source.recovery)
    try:
        async with closing(worker, router):
            raw.send_multipart([b"12345678", b"no question"])
            raw.send_multipart([b"one frame"])
            raw.send_multipart([b"a", b"b", b"c"])
            raw.send_multipart([b"12345678", encode_question(SnapshotQuestion(RANK)) * 1_000])
            await until(lambda: len(worker.malformed) == 3)
            router.plane.follow(card(4, worker.plane.source))
            assert await router.plane.recover_snapshot(RANK) == SNAPSHOT
            assert len(worker.malformed) == 3, "what is too large was not read at all"
    finally:
        raw.close()
        context.term()


async def test_too_large_event_is_dropped_and_counted() -> None:
    worker, router = Worker(), Router()
    async with closing(worker, router):
        router.plane.follow(card(4, worker.plane.source))
        await until_delivered(worker.plane, router.plane, RANK.worker_id)
        column = pack_hashes(range(BATCH_MAX_BYTES // 16))
        small, large = Stored(None, b"", b""), Stored(None, column, column)
        worker.plane.publish(KvBatch(RANK, EPOCH, EventId(0), (small, large, small, small)))
        await until(lambda: EventId(4) in [sent.next_event_id for sent in router.batches])
        assert len(worker.dropped) == 1
        assert "too large" in worker.dropped[0]
        heard = [sent.first_event_id for sent in router.batches if sent.epoch == EPOCH]
        assert heard == [0, 2], "ids show what is missing"


async def test_router_that_does_not_read_does_not_delay_another() -> None:
    worker, router = Worker(), Router()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    idle = context.socket(zmq.SUB)
    idle.linger = 0
    idle.subscribe(b"")
    idle.connect(worker.plane.source.events)
    try:
        async with closing(worker, router):
            router.plane.follow(card(4, worker.plane.source))
            await until_delivered(worker.plane, router.plane, RANK.worker_id)
            n_before = len(router.batches)
            column = pack_hashes(range(200))
            for number in range(20_000):
                worker.plane.publish(KvBatch(RANK, EPOCH, EventId(number), (Stored(None, column, column),)))
                if number % 100 == 0:
                    await asyncio.sleep(0)
            worker.plane.publish(batch(20_000))
            await until(lambda: len(router.batches) > n_before)
    finally:
        idle.close()
        context.term()


async def test_worker_restarted_on_its_port_is_heard_and_answers_recovery() -> None:
    worker, router = Worker(token="t"), Router(token="t")
    ports = [int(at.rpartition(":")[2]) for at in (worker.plane.source.events, worker.plane.source.recovery)]
    async with closing(router):
        router.plane.follow(card(4, worker.plane.source))
        await until_delivered(worker.plane, router.plane, RANK.worker_id)
        await worker.plane.close()
        worker = Worker(token="t", port=ports[0], recovery_port=ports[1])
        async with closing(worker):
            await until_delivered(worker.plane, router.plane, RANK.worker_id)
            assert await router.plane.recover_snapshot(RANK) == SNAPSHOT


async def test_unfollowing_one_worker_keeps_another_of_the_same_process() -> None:
    worker, router = Worker(), Router()
    async with closing(worker, router):
        end = router.plane.follow(card(4, worker.plane.source))
        router.plane.follow(card(5, worker.plane.source))
        await until_delivered(worker.plane, router.plane, OTHER.worker_id)
        end()
        end()
        assert await router.plane.recover_snapshot(RANK) is None
        async with asyncio.timeout(LIMIT_S):
            while True:  # the worker hears of the end a moment later
                router.batches.clear()
                worker.plane.publish(batch(7))
                worker.plane.publish(batch(8, OTHER))
                await until(lambda: batch(8, OTHER) in router.batches)
                if batch(7) not in router.batches:
                    break


async def test_recovery_asks_a_new_start_followed_before_the_old_one_ended() -> None:
    old, new, router = Worker(), Worker(), Router()
    async with closing(old, new, router):
        end_old = router.plane.follow(card(4, old.plane.source))
        router.plane.follow(card(4, new.plane.source, incarnation=2))
        end_old()
        await until_delivered(new.plane, router.plane, RANK.worker_id)
        assert await router.plane.recover_snapshot(RANK) == SNAPSHOT


async def test_load_report_arrives() -> None:
    worker, router = Worker(), Router()
    async with closing(worker, router):
        router.plane.follow(card(4, worker.plane.source))
        await until_delivered(worker.plane, router.plane, RANK.worker_id)
        worker.plane.publish_load(LoadReport(RANK, 3, 10))
        await until(lambda: router.loads == [LoadReport(RANK, 3, 10)])


async def test_open_recovery_questions_return_none_at_close() -> None:
    router = Router()
    nowhere = EventSource(EventTransport.ZMQ, events="tcp://127.0.0.1:1", recovery="tcp://127.0.0.1:1")
    router.plane.follow(card(4, nowhere))
    asking = asyncio.create_task(router.plane.recover_snapshot(RANK))
    await asyncio.sleep(0)
    await router.plane.close()
    assert await asking is None
    assert await router.plane.recover_snapshot(RANK) is None


@pytest.mark.parametrize(
    "source",
    [
        EventSource(EventTransport.ZMQ),
        EventSource(EventTransport.ZMQ, events="tcp://127.0.0.1:1"),
        EventSource(EventTransport.NATS, events="tcp://127.0.0.1:1", recovery="tcp://127.0.0.1:1"),
        EventSource(EventTransport.ZMQ, events="no endpoint", recovery="tcp://127.0.0.1:1"),
        EventSource(EventTransport.ZMQ, events="tcp://127.0.0.1:1", recovery="no endpoint"),
    ],
)
async def test_card_with_an_incomplete_event_source_is_refused(source: EventSource) -> None:
    router = Router()
    async with closing(router):
        with pytest.raises(ConfigError) as caught:
            router.plane.follow(card(4, source))
        assert caught.value.param == "event_source"


async def test_taken_port_or_unadvertised_wildcard_host_is_refused() -> None:
    worker = Worker()
    async with closing(worker):
        taken = int(worker.plane.source.events.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen on"):
            Worker(port=taken)
        with pytest.raises(ConfigError, match="advertise"):
            ZmqEventPublisher("0.0.0.0", on_malformed=worker.malformed.append)
        reachable = ZmqEventPublisher(
            "0.0.0.0", advertise_host="router-sees-this", on_malformed=worker.malformed.append
        )
        assert reachable.source.events.startswith("tcp://router-sees-this:")
        await reachable.close()


async def test_both_ends_close_while_libzmq_waits_for_ever(set_constants: SetConstants) -> None:
    set_constants(publisher, TERM_LIMIT_S=0.01)
    worker, router = Worker(), Router()
    with waiting_libzmq() as n_waiting:
        async with closing(worker, router):
            router.plane.follow(card(4, worker.plane.source))
            await until_delivered(worker.plane, router.plane, RANK.worker_id)
            with pytest.raises(ConfigError, match="cannot listen"):
                Worker(port=int(worker.plane.source.events.rpartition(":")[2]))
        await until(lambda: n_waiting() == 3)
