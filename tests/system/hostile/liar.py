"""A worker that was admitted, in the test's own process, and says of itself and others what it likes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import DpRank, Epoch, EventId, ModelName, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, Role, WorkerCard
from kvrouter.transports.events.encoding import encode_batch, encode_load
from kvrouter.transports.events.zmq import ZmqEventPublisher
from kvrouter.transports.events.zmq.sockets import BATCH, LOAD, worker_topic
from kvrouter.transports.records.file import FileDiscovery
from tests.testing.fleet_checks import BLOCK_SIZE
from tests.testing.processes import Fleet

LIAR = WorkerId(66)


class Liar:
    """Its card is found by every frontend of the fleet; what it publishes is for :class:`ZmqEventPublisher`'s
    subscribers. It answers ``snapshot`` to whoever asks for its whole state.
    """

    def __init__(self, events: ZmqEventPublisher, discovery: FileDiscovery, card: WorkerCard) -> None:
        self.events = events
        self._discovery = discovery
        self.card = card
        self.rank = WorkerRank(card.worker_id, DpRank(0))
        self.epoch = card.incarnation
        self.snapshot: KvSnapshot | None = KvSnapshot(self.rank, self.epoch, EventId(0), ())
        events.serve_recovery(card.worker_id, self)

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return self.snapshot

    async def grows(self, **of_card: Any) -> None:
        """Publish another card."""
        self.card = msgspec.structs.replace(self.card, **of_card)
        await self._discovery.publish(self.card)

    def say(self, batch: KvBatch) -> None:
        """Publish a batch on the liar's own topic, whatever rank it names."""
        self.events._send(worker_topic(self.card.worker_id) + BATCH + encode_batch(batch))

    def say_load(self, report: LoadReport) -> None:
        """Publish a load report likewise."""
        self.events._send(worker_topic(self.card.worker_id) + LOAD + encode_load(report))


@asynccontextmanager
async def admitted(fleet: Fleet, **of_card: object) -> AsyncIterator[Liar]:
    """A liar with the fleet's token, over zmq and the fleet's discovery directory."""

    def reported(*why: str) -> None:
        raise AssertionError(why)

    events = ZmqEventPublisher(
        "127.0.0.1", token=fleet.environ.get("KVROUTER_PLANE_TOKEN"), on_malformed=reported
    )
    discovery = FileDiscovery(
        fleet.folder / "discovery", namespace=fleet.namespace, on_trouble=reported, on_refused=reported
    )
    card = WorkerCard(
        worker_id=LIAR,
        incarnation=Epoch(6_666),
        model=ModelName("mock"),
        role=Role.BOTH,
        block_size=BLOCK_SIZE,
        context_length=32_768,
        address=f"tcp://127.0.0.1:1/{LIAR}/6666",
        namespace=fleet.namespace,
        event_source=events.source,
        tokenizer="mock",
    )
    try:
        card = msgspec.structs.replace(card, **of_card)
        await discovery.publish(card)
        yield Liar(events, discovery, card)
    finally:
        await discovery.withdraw(card.worker_id, card.incarnation)
        await discovery.close()
        await events.close()
