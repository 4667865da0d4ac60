"""Both ends of every event transport, by name, for the tests that hold over all of them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import nats
import zmq
from nats.aio.client import Client

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, LoadReport, WorkerCard
from kvrouter.transports.events.encoding import encode_batch, encode_load
from kvrouter.transports.events.jetstream import JetStreamPublisher, JetStreamSubscriber
from kvrouter.transports.events.jetstream.publisher import PublisherLimits
from kvrouter.transports.events.jetstream.stream import ComponentNames
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.events.nats import NatsEventPublisher, NatsEventSubscriber
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource
from kvrouter.transports.events.subjects import events_subject, loads_subject, message_auth_of
from kvrouter.transports.events.zmq import ZmqEventPublisher, ZmqEventSubscriber
from kvrouter.transports.events.zmq.sockets import BATCH, LOAD, worker_topic
from tests.testing.plain_fleets import worker_card
from tests.testing.waits import LIMIT_S

TOKEN = "t0p"
PATIENT_S = 30.0
"""A busy machine needs longer for a large answer than a router would wait."""

FOLLOWED = (WorkerId(4), WorkerId(5))
OTHER_WORKER = WorkerId(99)
"""A worker of the component that no test is about."""


@contextmanager
def waiting_libzmq() -> Iterator[Callable[[], int]]:
    """Meanwhile no ZeroMQ context ends; yields how many wait for that. The event loop's must not."""
    loop_thread, may_end, waiting, term = threading.current_thread(), threading.Event(), [], zmq.Context.term

    def wait(context: "zmq.Context[Any]") -> None:
        assert threading.current_thread() is not loop_thread, "the event loop waits for libzmq"
        waiting.append(context)
        may_end.wait(LIMIT_S)
        term(context)

    with patch.object(zmq.Context, "term", wait):
        try:
            yield lambda: len(waiting)
        finally:
            may_end.set()


def card(worker_id: int, source: EventSource, *, incarnation: int = 1) -> WorkerCard:
    return worker_card(worker_id, incarnation=Epoch(incarnation), block_size=16, event_source=source)


async def until_delivered(
    publisher: EventPublisher, subscriber: EventSubscriber, worker_id: WorkerId
) -> None:
    """Return once what ``publisher`` says for the worker arrives: nobody hears what was said before."""
    rank = WorkerRank(worker_id, DpRank(0))
    heard = asyncio.Event()
    last = EventId(0)

    def on_batch(batch: KvBatch) -> None:
        if batch.rank == rank and batch.first_event_id == last:
            heard.set()

    end = subscriber.subscribe(on_batch, lambda _report: None)
    async with asyncio.timeout(LIMIT_S):
        while not heard.is_set():
            last = EventId(last + 1)
            publisher.publish(KvBatch(rank, Epoch(0), last, ()))
            await asyncio.sleep(0.01)
    await _until_drained(publisher, subscriber, rank)
    end()


async def _until_drained(publisher: EventPublisher, subscriber: EventSubscriber, rank: WorkerRank) -> None:
    """Return once the last of what was said is heard, so that nothing of it disturbs a test."""
    heard = asyncio.Event()
    final = KvBatch(rank, Epoch(1), EventId(0), ())
    end = subscriber.subscribe(lambda batch: heard.set() if batch == final else None, lambda _report: None)
    publisher.publish(final)
    await asyncio.wait_for(heard.wait(), LIMIT_S)
    end()


class EventTransportSetup(Protocol):
    """One worker process and one router on one plane, which deliver to each other already."""

    @property
    def publisher(self) -> EventPublisher: ...
    @property
    def subscriber(self) -> EventSubscriber: ...

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]: ...

    @property
    def foreign(self) -> list[ForeignRank]:
        """What the router was notified of messages that spoke for somebody else's rank."""

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        """An admitted worker says both on the channel that is ``channel``'s, whatever rank they name."""


class MemoryTransport:
    def __init__(self) -> None:
        self.foreign: list[ForeignRank] = []
        self.publisher = self.subscriber = MemoryEventTransport()

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.publisher.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        raise NotImplementedError("a call has no channel")


@asynccontextmanager
async def memory_transport(_nats_url: str, _namespace: str) -> AsyncIterator[MemoryTransport]:
    yield MemoryTransport()


class ZmqTransport:
    """A worker and a router with a loopback connection."""

    def __init__(self) -> None:
        self.malformed: list[str] = []
        self.foreign: list[ForeignRank] = []
        self.publisher = ZmqEventPublisher("127.0.0.1", token=TOKEN, on_malformed=self.malformed.append)
        self.subscriber = ZmqEventSubscriber(
            token=TOKEN,
            on_malformed=self.malformed.append,
            on_foreign=self.foreign.append,
            answer_timeout_s=PATIENT_S,
        )

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.publisher.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        topic = worker_topic(channel.worker_id)
        for message in (topic + BATCH + encode_batch(batch), topic + LOAD + encode_load(load)):
            assert self.publisher._send(message)


@asynccontextmanager
async def zmq_transport(_nats_url: str, _namespace: str) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport()
    try:
        await _follow(transport, *FOLLOWED)
        yield transport
        assert transport.malformed == []
    finally:
        await transport.subscriber.close()
        await transport.publisher.close()


class _OverNats:
    """A worker and a router, each with a connection of its own; recovery is asked for over NATS Core."""

    def __init__(
        self,
        worker: Client,
        router: Client,
        namespace: str,
        on_malformed: Callable[[str], None],
    ) -> None:
        self.worker, self.router, self.namespace = worker, router, namespace
        self.server = NatsRecovery(worker, namespace=namespace, token=TOKEN, on_malformed=on_malformed)
        self.asker = NatsRecovery(
            router,
            namespace=namespace,
            token=TOKEN,
            on_malformed=on_malformed,
            answer_timeout_s=PATIENT_S,
        )

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.server.serve_recovery(worker_id, source)

    def events_subject(self, channel: WorkerRank) -> str:
        return events_subject(self.namespace, "backend", channel)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        auth = message_auth_of(TOKEN, self.namespace)
        events = self.events_subject(channel)
        loads = loads_subject(self.namespace, "backend", channel)
        await self.worker.publish(events, auth.seal(events, encode_batch(batch)))
        await self.worker.publish(loads, auth.seal(loads, encode_load(load), number=time.time_ns()))

    async def close(self) -> None:
        await self.server.close()
        await self.asker.close()


class NatsTransport(_OverNats):
    def __init__(self, worker: Client, router: Client, namespace: str) -> None:
        self.malformed: list[str] = []
        self.foreign: list[ForeignRank] = []
        self.dropped: list[tuple[int, str]] = []
        super().__init__(worker, router, namespace, self.malformed.append)
        self.publisher = NatsEventPublisher(
            worker,
            namespace=namespace,
            component="backend",
            token=TOKEN,
            on_dropped=lambda n_batches, why: self.dropped.append((n_batches, why)),
            drops_reported_every_s=0.1,
        )
        self.subscriber = NatsEventSubscriber(
            router,
            self.asker,
            namespace=namespace,
            token=TOKEN,
            on_malformed=self.malformed.append,
            on_foreign=self.foreign.append,
        )

    def n_dropped(self) -> int:
        """How many batches were not published, as far as that was reported."""
        return sum(n_batches for n_batches, _ in self.dropped)

    async def close(self) -> None:
        await self.publisher.close()
        await self.subscriber.close()
        await super().close()


async def connect(url: str) -> Client:
    """A connection that is made again for as long as it takes, and soon."""
    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)


@asynccontextmanager
async def _two_clients(nats_url: str) -> AsyncIterator[tuple[Client, Client]]:
    worker, router = await connect(nats_url), await connect(nats_url)
    try:
        yield worker, router
    finally:
        await worker.close()
        await router.close()


@asynccontextmanager
async def nats_transport(nats_url: str, namespace: str) -> AsyncIterator[NatsTransport]:
    async with _two_clients(nats_url) as clients:
        transport = NatsTransport(*clients, namespace)
        await transport.subscriber.start()
        await _follow(transport, *FOLLOWED)
        yield transport
        await transport.close()
        assert transport.malformed == []


class TransportReports:
    """Remembers what the transport reports."""

    def __init__(self) -> None:
        self.dropped_batches = 0
        self.refusals: list[str] = []
        self.foreign: list[ForeignRank] = []
        self.disturbances: list[str] = []
        self.resets: list[str] = []

    def dropped(self, n_batches: int, why: str) -> None:
        self.dropped_batches += n_batches

    def refused(self, why: str) -> None:
        self.refusals.append(why)

    def spoke_for_another(self, error: ForeignRank) -> None:
        self.foreign.append(error)

    def disturbed(self, component: str, why: str) -> None:
        self.disturbances.append(f"{component}: {why}")

    def was_reset(self, component: str) -> None:
        self.resets.append(component)


class JetStreamTransport(_OverNats):
    def __init__(self, worker: Client, router: Client, namespace: str) -> None:
        self.notes = TransportReports()
        self.foreign = self.notes.foreign
        super().__init__(worker, router, namespace, self.notes.refused)
        self.publisher = JetStreamPublisher(
            worker,
            namespace=namespace,
            component="backend",
            token=TOKEN,
            observer=self.notes,
            limits=PublisherLimits(merged_events_max=1),  # every batch arrives as it was published
        )
        self.subscriber = JetStreamSubscriber(
            router, self.asker, namespace=namespace, token=TOKEN, replica_name="one", observer=self.notes
        )

    def events_subject(self, channel: WorkerRank) -> str:
        return ComponentNames(self.namespace, "backend").events(channel)

    async def close(self) -> None:
        await self.publisher.close(limit_s=60.0)
        await self.subscriber.close()
        await super().close()


@asynccontextmanager
async def jetstream_transport(nats_url: str, namespace: str) -> AsyncIterator[JetStreamTransport]:
    async with _two_clients(nats_url) as clients:
        transport = JetStreamTransport(*clients, namespace)
        await _follow(transport, OTHER_WORKER)
        yield transport
        await transport.close()
        assert transport.notes.refusals == []
        assert transport.notes.dropped_batches == 0


async def _follow(transport: EventTransportSetup, *delivered: WorkerId) -> None:
    """Follow workers 4 and 5; return once batches of these workers are delivered."""
    for worker_id in FOLLOWED:
        transport.subscriber.follow(card(worker_id, transport.publisher.source))
    for worker_id in delivered:
        await until_delivered(transport.publisher, transport.subscriber, worker_id)


@dataclass(frozen=True)
class EventTransportKind:
    """``open`` takes the URL of a nats-server, or "" where none is needed, and a namespace of its own.

    Its router follows the workers 4 and 5. Without channels, within one process, a batch comes by nothing
    but a call.
    """

    open: Callable[[str, str], AbstractAsyncContextManager[EventTransportSetup]]
    needs_nats: bool = False
    has_channels: bool = True


EVENT_TRANSPORTS: dict[str, EventTransportKind] = {
    "memory": EventTransportKind(memory_transport, has_channels=False),
    "zmq": EventTransportKind(zmq_transport),
    "nats": EventTransportKind(nats_transport, needs_nats=True),
    "jetstream": EventTransportKind(jetstream_transport, needs_nats=True),
}
