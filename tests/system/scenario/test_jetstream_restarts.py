"""A router's restart forgets nothing that matters, with the stream and a snapshot of the index."""

from collections.abc import AsyncIterator

import pytest

from tests.testing.blocks import blocks
from tests.testing.jetstream_fleet import Fleet, fleet_on
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until


@pytest.fixture
async def fleet(shared_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(shared_nats.url) as opened:
        yield opened


async def test_a_late_router_learns_everything_from_the_stream(fleet: Fleet) -> None:
    workers = [fleet.worker(1), fleet.worker(2, component="prefill")]
    for worker in workers:
        worker.serve(20)
    await fleet.published()
    replica = await fleet.knows("late", *workers, refused=True)
    for worker in workers:
        worker.serve(5)
    await replica.until_right(*workers)
    assert replica.asking.asked == 0


async def test_a_late_router_learns_all_from_snapshot_and_later_events(fleet: Fleet) -> None:
    workers = [fleet.worker(1), fleet.worker(2, component="prefill")]
    first = await fleet.replica("first")
    first.join(*workers)
    for worker in workers:
        worker.serve(20)
    await first.until_right(*workers)
    assert await first.snapshots.check() == 2, "one of each component"
    for worker in workers:
        worker.serve(3)
    await first.until_right(*workers)
    await first.stop()
    for worker in workers:
        worker.serve(3)
    await fleet.published()
    await fleet.knows_from_nats("late", *workers)


async def test_events_during_a_routers_start_leave_no_gap(
    fleet: Fleet,
) -> None:
    worker = fleet.worker(1)
    for _ in range(10):
        worker.serve(1)
    await fleet.published()
    late = await fleet.replica("late", refused=True)
    late.join(worker)
    for _ in range(30):
        worker.serve(1)
        await fleet.published()
    await late.until_right(worker)
    assert late.asking.asked == 0
    assert late.telemetry.feed_events.value("m", "gaps") == 0


async def test_a_restarted_worker_is_not_mistaken_for_its_snapshot(fleet: Fleet) -> None:
    worker, (first,) = await fleet.known("first", serves=10)
    assert await first.snapshots.check() == 1
    worker.serve(2)  # what is left of the old start in the stream
    await fleet.published()
    worker.die()
    newer = fleet.worker(1, epoch=2)
    newer.serve(5)
    await fleet.published()
    late = await fleet.knows("late", newer, refused=True)
    first.join(newer)
    await first.until_right(newer)
    newer.serve(5)
    await late.until_right(newer)
    await first.until_right(newer)
    assert late.asking.asked == 0


async def test_a_rank_with_a_purged_history_asks_its_worker(fleet: Fleet) -> None:
    worker = fleet.worker(1)
    for _ in range(5):
        worker.serve(1)
        await fleet.published()
    late = await fleet.replica("late")
    late.subscriber.follow(worker.card)
    stream = late.subscriber._subscribers["backend"].stream
    rank = worker.card.ranks()[0]
    first = await stream.first_of(rank)
    assert first is not None
    await stream.purge(through=first.sequence)
    answer = await late.subscriber.recover_snapshot(rank)
    assert answer is not None
    assert blocks(answer.events) == worker.holds(rank)
    assert late.asking.asked == 1


async def test_a_rank_with_missed_batches_asks_its_worker(fleet: Fleet) -> None:
    worker, (replica,) = await fleet.known("only", serves=5)
    asked = replica.asking.asked
    silent = fleet.publisher("backend")
    worker.publisher.kv._events = Deaf(silent)  # type: ignore[assignment]
    worker.serve(5)
    worker.publisher.kv._events = silent
    worker.heartbeat()
    await replica.until_right(worker)
    assert replica.asking.asked > asked
    await until(lambda: fleet.publisher("backend").is_idle)


class Deaf:
    """Lets every batch go."""

    def __init__(self, publisher: object) -> None:
        pass

    def publish(self, batch: object) -> None:
        pass
