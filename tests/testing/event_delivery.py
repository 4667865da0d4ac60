"""What the tests of event planes wait for, and the cards that their routers follow."""

import asyncio

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, ModelName, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, Role, WorkerCard
from kvrouter.transports.events.port import EventPublisher, EventSubscriber
from tests.testing.waits import LIMIT_S


def card(worker_id: int, source: EventSource, *, incarnation: int = 1) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=Epoch(incarnation),
        model=ModelName("m"),
        role=Role.BOTH,
        block_size=16,
        context_length=1024,
        address="nowhere",
        event_source=source,
    )


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
