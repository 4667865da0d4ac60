"""Snapshots of the index: one replica at a time, safe against dying anywhere, never past what they cover."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvrouter.transports.events.jetstream.snapshot_store import Claim
from kvrouter.transports.events.jetstream.stream_subscriber import ComponentSubscriber
from tests.testing.jetstream_fleet import Fleet, Replica, Worker, fleet_on
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until

STEPS = ["claim", "tidy", "part", "list", "commit", "purge", "remove"]


@pytest.fixture
async def fleet(shared_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(shared_nats.url) as opened:
        yield opened


def subscriber_of(replica: Replica) -> ComponentSubscriber:
    return replica.subscriber._subscribers["backend"]


async def messages(replica: Replica) -> int:
    return (await subscriber_of(replica).stream.read()).messages


async def snapshots_stored(replica: Replica) -> set[str]:
    return {name.partition("/")[0] for name in await subscriber_of(replica).snapshots.objects()}


async def take(replica: Replica, worker: Worker) -> None:
    """Take a snapshot, as soon as the lease of whoever held the key is over."""
    async with asyncio.timeout(60):
        while not await replica.snapshots.check():
            worker.serve(1)
            await replica.until_right(worker)


def dies_before(replica: Replica, step: str) -> None:
    """From ``step`` on nothing that the replica does reaches NATS any more."""
    subscriber = subscriber_of(replica)
    left = STEPS.index(step)

    def fatal(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def maybe(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise ConnectionError("dead")
            return await call(*args, **kwargs)

        return maybe

    for owner, name in (
        (subscriber.snapshots, "write"),
        (subscriber.snapshots, "put"),
        (subscriber.snapshots, "remove"),
        (subscriber.stream, "purge"),
    ):
        setattr(owner, name, fatal(getattr(owner, name)))


async def test_only_one_of_two_replicas_takes_the_snapshot_and_both_stay_right(fleet: Fleet) -> None:
    worker, replicas = await fleet.known("a", "b", serves=10)
    before = await messages(replicas[0])
    assert sum(await asyncio.gather(*(replica.snapshots.check() for replica in replicas))) == 1
    assert before > 0
    assert await messages(replicas[0]) == 0
    worker.serve(5)
    for replica in replicas:
        await replica.until_right(worker)
        assert await messages(replica) > 0
    await take(replicas[1], worker)
    assert len(await snapshots_stored(replicas[1])) == 1
    worker.serve(5)
    await fleet.knows_from_nats("late", worker)


@pytest.mark.parametrize("step", STEPS)
async def test_a_replica_dying_at_any_snapshot_step_leaves_a_valid_one(fleet: Fleet, step: str) -> None:
    worker, (dying, staying) = await fleet.known("dying", "staying", serves=6)
    assert await dying.snapshots.check() == 1
    worker.serve(3)
    await dying.until_right(worker)
    dies_before(dying, step)
    assert await dying.snapshots.check() == 0
    await dying.stop()

    worker.serve(2)
    await fleet.published()
    await fleet.knows_from_nats("late", worker)

    await take(staying, worker)
    assert len(await snapshots_stored(staying)) == 1, "what the dead one left is gone"
    worker.serve(2)
    await fleet.knows_from_nats("later", worker)


async def test_a_replica_whose_snapshot_claim_lapsed_does_not_commit(fleet: Fleet) -> None:
    worker, (slow, quick) = await fleet.known("slow", "quick", serves=6)
    taking = await slow.subscriber.take("backend")
    assert taking is not None
    claimed = await subscriber_of(quick).snapshots.claim()
    assert await quick.subscriber.take("backend") is None
    async with asyncio.timeout(60):
        while (await subscriber_of(quick).snapshots.claim()).revision < claimed.revision + 3:
            assert await quick.subscriber.take("backend") is None, "it renews its claim"
    taking._end_renewal()  # type: ignore[attr-defined]  # as if the process were paused
    await quick.until_right(worker)
    await take(quick, worker)
    with pytest.raises(Exception, match="no more at revision"):
        await taking.commit()
    await taking.abandon()
    assert len(await snapshots_stored(quick)) == 1
    await fleet.knows("late", worker, refused=True)


async def written_without_answer(replica: Replica) -> asyncio.Event:
    """Return once NATS has stored the next renewal of a claim; its answer comes when the event is set."""
    snapshots = subscriber_of(replica).snapshots
    write, is_stored, is_answered = snapshots.write, asyncio.Event(), asyncio.Event()

    async def write_once(claim: Claim, *, over: int) -> int:
        snapshots.write = write  # type: ignore[method-assign]
        revision = await write(claim, over=over)
        is_stored.set()
        await is_answered.wait()
        return revision

    snapshots.write = write_once  # type: ignore[method-assign]
    await is_stored.wait()
    return is_answered


async def test_a_snapshot_is_committed_amid_a_renewal_of_its_claim(fleet: Fleet) -> None:
    _, (taker,) = await fleet.known("taker", serves=6)
    taking = await taker.subscriber.take("backend")
    assert taking is not None
    is_answered = await written_without_answer(taker)
    snapshots, is_listed = subscriber_of(taker).snapshots, asyncio.Event()
    put = snapshots.put

    async def put_list(name: str, body: bytes) -> None:
        await put(name, body)
        is_listed.set()

    snapshots.put = put_list  # type: ignore[method-assign]
    committing = asyncio.create_task(taking.commit())
    await is_listed.wait()  # the next step of the commit is to write the key
    is_answered.set()
    await committing
    claim = (await snapshots.claim()).claim
    assert (claim.holder, {claim.snapshot}) == ("", await snapshots_stored(taker))


async def abandoned_amid_renewal(fleet: Fleet) -> tuple[Replica, asyncio.Event, asyncio.Task[None]]:
    """Return a replica that gives up a snapshot, and what makes NATS answer the renewal that it waits for."""
    _, (taker,) = await fleet.known("taker", serves=6)
    taking = await taker.subscriber.take("backend")
    assert taking is not None
    is_answered = await written_without_answer(taker)
    abandoning = asyncio.create_task(taking.abandon())
    await asyncio.sleep(0)  # it has come to writing the key
    return taker, is_answered, abandoning


async def test_a_snapshot_abandoned_amid_a_renewal_leaves_the_key_free(fleet: Fleet) -> None:
    taker, is_answered, abandoning = await abandoned_amid_renewal(fleet)
    is_answered.set()
    await abandoning
    assert (await subscriber_of(taker).snapshots.claim()).claim.holder == ""


async def test_a_snapshot_whose_abandoning_is_cancelled_renews_its_claim_no_more(fleet: Fleet) -> None:
    """As by a replica that stops while NATS is slow."""
    _, is_answered, abandoning = await abandoned_amid_renewal(fleet)
    abandoning.cancel()
    await asyncio.wait({abandoning})
    is_answered.set()
    await until(lambda: all(task.get_name() != "index: hold the claim" for task in asyncio.all_tasks()))


async def test_a_snapshot_replaced_during_a_replicas_start_is_reloaded(
    fleet: Fleet,
) -> None:
    first, second = fleet.worker(1), fleet.worker(2)
    taker = await fleet.replica("taker")
    taker.join(first, second)
    for worker in (first, second):
        worker.serve(6)
    await taker.until_right(first, second)
    assert await taker.snapshots.check() == 1

    starting = await fleet.knows("starting", first, refused=True)
    first.serve(3)
    second.serve(3)
    await taker.until_right(first, second)
    await take(taker, first)
    starting.join(second)
    await starting.until_right(first, second)
    assert starting.asking.asked == 0


async def test_a_purge_between_a_snapshot_and_its_replay_is_noticed(fleet: Fleet) -> None:
    worker, (taker,) = await fleet.known("taker", serves=6)
    assert await taker.snapshots.check() == 1
    worker.serve(6)
    await taker.until_right(worker)

    starting = await fleet.replica("starting", refused=True)
    starting.subscriber.follow(worker.card)
    limit = subscriber_of(starting)._replays.limit
    for _ in range(limit._value):
        await limit.acquire()
    starting.join(worker)
    await until(lambda: len(subscriber_of(starting)._replays.running) == len(worker.card.ranks()))
    await take(taker, worker)  # what the waiting replays want is gone now
    limit.release()
    await starting.until_right(worker)


async def test_a_lagging_replica_whose_events_were_purged_asks_the_worker(fleet: Fleet) -> None:
    worker, (taker, lagging) = await fleet.known("taker", "lagging", serves=6)
    subscriber = subscriber_of(lagging)
    subscriber._task.cancel()
    await asyncio.gather(subscriber._task, return_exceptions=True)
    worker.serve(6)
    await taker.until_right(worker)
    assert await taker.snapshots.check() == 1
    subscriber._task = asyncio.get_running_loop().create_task(subscriber._run())
    worker.heartbeat()
    await lagging.until_right(worker)
    assert lagging.asking.asked > 0


async def test_ranks_missing_from_the_snapshot_are_asked_from_their_worker(fleet: Fleet) -> None:
    known, other = fleet.worker(1), fleet.worker(2)
    taker = await fleet.replica("taker")
    taker.join(known)
    for worker in (known, other):
        worker.serve(6)
    await fleet.published()
    await taker.until_right(known)
    last = (await subscriber_of(taker).stream.read()).last
    await until(lambda: subscriber_of(taker).position == last)
    assert await taker.snapshots.check() == 1
    late = await fleet.knows("late", known, other)
    assert late.asking.asked == len(other.card.ranks())


async def test_reset_states_clears_the_stream_and_the_snapshots_once(fleet: Fleet) -> None:
    worker, (first,) = await fleet.known("first", serves=6)
    assert await first.snapshots.check() == 1
    worker.serve(3)
    await first.until_right(worker)
    await first.stop()

    fresh = await fleet.replica("fresh", resets=True)
    fresh.join(worker)
    await fresh.until_right(worker)
    assert fresh.notes.resets == ["backend"]
    assert fresh.asking.asked == len(worker.card.ranks()), "there is nothing else to learn from"
    assert await messages(fresh) == 0
    assert await snapshots_stored(fresh) == set()
    worker.serve(3)
    await fresh.until_right(worker)
    assert await fresh.snapshots.check() == 1
