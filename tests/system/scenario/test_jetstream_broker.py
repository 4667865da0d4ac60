"""The JetStream transport when the broker dies, comes back, or loses what it kept."""

from collections.abc import AsyncIterator

import pytest

from kvrouter.transports.events.jetstream.publisher import PublisherLimits
from kvrouter.transports.events.jetstream.stream import ComponentNames
from tests.testing.jetstream_fleet import Fleet, fleet_on
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until


@pytest.fixture
async def fleet(own_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(own_nats.url) as opened:
        yield opened


async def test_no_event_is_lost_when_the_broker_is_killed_and_restarted(
    fleet: Fleet, own_nats: NatsServer
) -> None:
    worker, (replica,) = await fleet.known("only", serves=5, refused=True)
    worker.serve(3)
    own_nats.kill()
    worker.serve(3)
    await until(lambda: not fleet.client.is_connected)
    worker.serve(3)
    own_nats.start()
    await fleet.published()
    await replica.until_right(worker)
    assert fleet.notes.dropped_batches == 0
    await fleet.knows("late", worker, refused=True)


async def test_batches_over_the_full_queue_are_dropped_while_nats_is_down(
    fleet: Fleet, own_nats: NatsServer
) -> None:
    worker, (replica,) = await fleet.known("only", serves=5)
    own_nats.kill()
    await until(lambda: not fleet.client.is_connected)
    fleet.publisher("backend")._limits = PublisherLimits(queue_batches_max=10)
    worker.serve(30)
    assert fleet.notes.dropped_batches > 0
    own_nats.start()
    await fleet.published()
    worker.heartbeat()
    await replica.until_right(worker)
    assert replica.asking.asked > 0


async def test_a_deleted_stream_is_created_again(fleet: Fleet) -> None:
    worker, (replica,) = await fleet.known("only", serves=5)
    assert await replica.snapshots.check() == 1
    await fleet.client.jetstream().delete_stream(ComponentNames(fleet.namespace, "backend").stream)
    worker.serve(5)
    await fleet.published()
    worker.heartbeat()
    await replica.until_right(worker)
    worker.serve(3)
    await replica.until_right(worker)
    await fleet.knows("late", worker)


async def test_a_deleted_consumer_is_created_again(fleet: Fleet) -> None:
    worker, (replica,) = await fleet.known("only", serves=5, refused=True)
    stream = ComponentNames(fleet.namespace, "backend").stream
    await fleet.client.jetstream().delete_consumer(stream, "kvrouter-only")
    worker.serve(5)
    await replica.until_right(worker)
    assert replica.notes.disturbances


async def test_a_stream_behind_the_known_position_is_read_from_its_start(fleet: Fleet) -> None:
    worker, (replica,) = await fleet.known("only", serves=5, refused=True)
    replica.subscriber._subscribers[
        "backend"
    ].position += 1_000_000  # what a broker knew before it lost its disk
    stream = ComponentNames(fleet.namespace, "backend").stream
    await fleet.client.jetstream().delete_consumer(stream, "kvrouter-only")
    worker.serve(5)
    await replica.until_right(worker)


async def test_no_event_is_lost_when_the_broker_hangs_for_a_while(fleet: Fleet, own_nats: NatsServer) -> None:
    worker, (replica,) = await fleet.known("only", serves=5, refused=True)
    own_nats.pause()
    worker.serve(5)
    await until(lambda: bool(replica.notes.disturbances))
    own_nats.resume()
    worker.serve(5)
    await fleet.published()
    await replica.until_right(worker)
