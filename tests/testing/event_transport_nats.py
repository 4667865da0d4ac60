"""Both ends of the NATS Core event plane, each with a connection of its own."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import nats
from nats.aio.client import Client

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import encode_batch, encode_load
from kvrouter.transports.events.nats import NatsEventPublisher, NatsEventSubscriber
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource
from kvrouter.transports.events.subjects import events_subject, loads_subject, message_auth_of
from tests.testing.event_delivery import card, until_delivered

TOKEN = "t0p"

PATIENT_S = 30.0
"""A busy machine needs longer for a large answer than a router would wait."""


class NatsTransport:
    def __init__(self, worker: Client, router: Client, namespace: str) -> None:
        self.malformed: list[str] = []
        self.foreign: list[ForeignRank] = []
        heard = self.malformed.append
        self.worker, self.router, self.namespace = worker, router, namespace
        self.dropped: list[tuple[int, str]] = []
        self.nats_publisher = NatsEventPublisher(
            worker,
            namespace=namespace,
            component="backend",
            token=TOKEN,
            on_dropped=lambda n_batches, why: self.dropped.append((n_batches, why)),
            drops_reported_every_s=0.1,
        )
        self.server = NatsRecovery(worker, namespace=namespace, token=TOKEN, on_malformed=heard)
        self.asker = NatsRecovery(
            router, namespace=namespace, token=TOKEN, on_malformed=heard, answer_timeout_s=PATIENT_S
        )
        self.nats_subscriber = NatsEventSubscriber(
            router,
            self.asker,
            namespace=namespace,
            token=TOKEN,
            on_malformed=heard,
            on_foreign=self.foreign.append,
        )
        self.publisher: EventPublisher = self.nats_publisher
        self.subscriber: EventSubscriber = self.nats_subscriber

    def n_dropped(self) -> int:
        """How many batches were not published, as far as that was reported."""
        return sum(n_batches for n_batches, _ in self.dropped)

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.server.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        seal = message_auth_of(TOKEN, self.namespace)
        events = events_subject(self.namespace, "backend", channel)
        loads = loads_subject(self.namespace, "backend", channel)
        await self.worker.publish(events, seal.seal(events, encode_batch(batch)))
        await self.worker.publish(loads, seal.seal(loads, encode_load(load), number=time.time_ns()))

    async def close(self) -> None:
        await self.nats_publisher.close()
        await self.nats_subscriber.close()
        await self.server.close()
        await self.asker.close()


async def connect(url: str) -> Client:
    """A connection that is made again for as long as it takes, and soon."""
    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)


@asynccontextmanager
async def nats_transport(nats_url: str, namespace: str) -> AsyncIterator[NatsTransport]:
    worker, router = await connect(nats_url), await connect(nats_url)
    try:
        transport = NatsTransport(worker, router, namespace)
        await transport.nats_subscriber.start()
        for worker_id in (WorkerId(4), WorkerId(5)):
            transport.subscriber.follow(card(worker_id, transport.publisher.source))
            await until_delivered(transport.publisher, transport.subscriber, worker_id)
        yield transport
        await transport.close()
        assert transport.malformed == []
    finally:
        await worker.close()
        await router.close()
