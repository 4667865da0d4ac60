"""Both ends of the zmq event plane, over a loopback connection."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import encode_batch, encode_load
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource
from kvrouter.transports.events.zmq import ZmqEventPublisher, ZmqEventSubscriber
from kvrouter.transports.events.zmq.sockets import BATCH, LOAD, worker_topic
from tests.testing.event_delivery import card, until_delivered

TOKEN = "a token that both ends share"
PATIENT_S = 30.0
"""A busy machine needs longer for a large answer than a router would wait."""


class ZmqTransport:
    def __init__(self) -> None:
        self.malformed: list[str] = []
        self.foreign: list[ForeignRank] = []
        self.zmq_publisher = ZmqEventPublisher("127.0.0.1", token=TOKEN, on_malformed=self.malformed.append)
        self.zmq_subscriber = ZmqEventSubscriber(
            token=TOKEN,
            on_malformed=self.malformed.append,
            on_foreign=self.foreign.append,
            answer_timeout_s=PATIENT_S,
        )
        self.publisher: EventPublisher = self.zmq_publisher
        self.subscriber: EventSubscriber = self.zmq_subscriber

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.zmq_publisher.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        topic = worker_topic(channel.worker_id)
        for message in (topic + BATCH + encode_batch(batch), topic + LOAD + encode_load(load)):
            assert self.zmq_publisher._send(message)


@asynccontextmanager
async def zmq_transport(_nats_url: str, _namespace: str) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport()
    try:
        for worker_id in (WorkerId(4), WorkerId(5)):
            transport.subscriber.follow(card(worker_id, transport.publisher.source))
            await until_delivered(transport.publisher, transport.subscriber, worker_id)
        yield transport
        assert transport.malformed == []
    finally:
        await transport.zmq_subscriber.close()
        await transport.zmq_publisher.close()
