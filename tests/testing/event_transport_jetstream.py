"""Both ends of the JetStream transport, each with a connection of its own, and what is heard from both."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.aio.client import Client

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import encode_batch, encode_load
from kvrouter.transports.events.jetstream import JetStreamPublisher, JetStreamSubscriber
from kvrouter.transports.events.jetstream.publisher import PublisherLimits
from kvrouter.transports.events.jetstream.stream import ComponentNames
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, ForeignRank, RecoverySource
from kvrouter.transports.events.subjects import loads_subject, message_auth_of
from tests.testing.event_delivery import card, until_delivered
from tests.testing.event_transport_nats import TOKEN, connect

OTHER_WORKER = WorkerId(99)
"""A worker of the component that no test is about."""


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


class JetStreamTransport:
    def __init__(self, worker: Client, router: Client, namespace: str) -> None:
        self.notes = TransportReports()
        self.foreign = self.notes.foreign
        self.worker, self.namespace = worker, namespace
        self.worker_end = JetStreamPublisher(
            worker,
            namespace=namespace,
            component="backend",
            token=TOKEN,
            observer=self.notes,
            limits=PublisherLimits(merged_events_max=1),  # every batch arrives as it was published
        )
        refused = self.notes.refused
        self.server = NatsRecovery(worker, namespace=namespace, token=TOKEN, on_malformed=refused)
        self.asker = NatsRecovery(router, namespace=namespace, token=TOKEN, on_malformed=refused)
        self.router_end = JetStreamSubscriber(
            router, self.asker, namespace=namespace, token=TOKEN, replica_name="one", observer=self.notes
        )
        self.publisher: EventPublisher = self.worker_end
        self.subscriber: EventSubscriber = self.router_end

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        return self.server.serve_recovery(worker_id, source)

    async def lie(self, channel: WorkerRank, *, batch: KvBatch, load: LoadReport) -> None:
        seal = message_auth_of(TOKEN, self.namespace)
        events = ComponentNames(self.namespace, "backend").events(channel)
        loads = loads_subject(self.namespace, "backend", channel)
        await self.worker.publish(events, seal.seal(events, encode_batch(batch)))
        await self.worker.publish(loads, seal.seal(loads, encode_load(load), number=time.time_ns()))

    async def close(self) -> None:
        await self.worker_end.close()
        await self.router_end.close()
        await self.server.close()
        await self.asker.close()


@asynccontextmanager
async def jetstream_transport(nats_url: str, namespace: str) -> AsyncIterator[JetStreamTransport]:
    worker, router = await connect(nats_url), await connect(nats_url)
    try:
        transport = JetStreamTransport(worker, router, namespace)
        for worker_id in (WorkerId(4), WorkerId(5)):
            transport.subscriber.follow(card(worker_id, transport.publisher.source))
        await until_delivered(transport.publisher, transport.subscriber, OTHER_WORKER)
        yield transport
        await transport.close()
        assert transport.notes.refusals == []
        assert transport.notes.dropped_batches == 0
    finally:
        await worker.close()
        await router.close()
