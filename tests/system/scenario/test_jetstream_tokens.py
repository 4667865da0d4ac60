"""JetStream when what is in NATS was sealed with another token: a stranger's, or yesterday's."""

from collections.abc import AsyncIterator

import pytest

from kvrouter.kernel.feed.states import FeedState
from kvrouter.transports.events.jetstream.stream import ComponentNames
from tests.testing.jetstream_fleet import Fleet, fleet_on
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until


@pytest.fixture
async def fleet(shared_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(shared_nats.url) as opened:
        yield opened


async def test_batches_with_a_wrong_token_change_no_block(fleet: Fleet) -> None:
    worker, (live,) = await fleet.known("live", serves=3, refused=True)
    async with fleet_on(fleet.url, namespace=fleet.namespace, token="guess") as strangers:
        forger = strangers.worker(1)  # with the id and the epoch of the other, and the ids of its events
        forger.serve(9)
        await strangers.published()
        worker.serve(3)
        await fleet.published()
        await live.until_right(worker)
        assert all("KVROUTER_PLANE_TOKEN" in why for why in live.notes.refusals)
        assert live.notes.refusals
        late = await fleet.knows("late", worker)
        assert late.state(worker.card.ranks()[0]) is FeedState.LIVE


async def test_a_batch_copied_to_another_subject_is_refused(fleet: Fleet) -> None:
    worker, (live,) = await fleet.known("live", serves=3, refused=True)
    names = ComponentNames(fleet.namespace, "backend")
    jetstream = fleet.client.jetstream()
    mine, other = (names.events(rank) for rank in worker.card.ranks())
    message = await jetstream.get_last_msg(names.stream, mine)
    await jetstream.publish(other, message.data or b"")
    await until(lambda: bool(live.notes.refusals))
    worker.serve(3)
    await live.until_right(worker)


async def test_a_fleet_with_a_new_token_starts_afresh_in_an_old_store(fleet: Fleet) -> None:
    """Snapshot and stream of yesterday open for nobody: workers are asked, and the next snapshot is valid."""
    worker, (first,) = await fleet.known("first", serves=9)
    assert await first.snapshots.check() == 1
    worker.serve(3)
    await fleet.published()
    worker.die()
    await first.stop()
    async with fleet_on(fleet.url, namespace=fleet.namespace, token="of today") as today:
        again = today.worker(1, epoch=2)
        again.serve(6)
        await today.published()
        second = await today.knows("second", again)
        assert second.asking.asked > 0
        assert any("snapshot key" in why for why in second.notes.refusals)
        assert await second.snapshots.check() == 1
        again.serve(3)
        await today.published()
        await today.knows_from_nats("third", again)


async def test_a_new_token_with_an_unresponsive_worker_blocks_no_router(fleet: Fleet) -> None:
    worker, (first,) = await fleet.known("first", serves=5)
    await fleet.published()
    worker.die()
    await first.stop()
    async with fleet_on(fleet.url, namespace=fleet.namespace, token="of today") as today:
        again = today.worker(1, epoch=2)
        deaf = await today.replica("deaf", refused=True)
        deaf.join(again)
        again.serve(5)
        await today.published()
        ranks = again.card.ranks()
        await until(lambda: all(deaf.state(rank) is FeedState.PARTIAL for rank in ranks))
        deaf.asking.refuses = False
        again.serve(5)
        late = await today.knows("late", again)
        assert late.asking.asked > 0
        assert all(not deaf.believes(rank) - again.holds(rank) for rank in ranks)


@pytest.mark.parametrize("part", ["latest", "ranks", "part"])
async def test_a_snapshot_written_by_another_fleet_is_not_loaded(fleet: Fleet, part: str) -> None:
    """He writes over the key, the list or the parts what another fleet of his own stored, as it is."""
    worker, (first,) = await fleet.known("first", serves=9)
    assert await first.snapshots.check() == 1
    jetstream = fleet.client.jetstream()
    bucket = ComponentNames(fleet.namespace, "backend").bucket
    async with fleet_on(fleet.url) as others:
        _, (replica,) = await others.known("other", serves=9)
        assert await replica.snapshots.check() == 1
        theirs = ComponentNames(others.namespace, "backend").bucket
        if part == "latest":
            value = (await (await jetstream.key_value(theirs)).get("latest")).value
            await (await jetstream.key_value(bucket)).put("latest", value or b"")
        else:
            here, there = await jetstream.object_store(bucket), await jetstream.object_store(theirs)
            bodies = [each.name for each in await there.list() if part in (each.name or "")]
            body = (await there.get(bodies[0] or "")).data or b""
            for each in await here.list():
                if part in (each.name or ""):
                    await here.put(each.name or "", body)
    late = await fleet.replica("late")
    late.join(worker)
    worker.serve(3)
    await first.until_right(worker)
    await late.until_right(worker)
    assert late.asking.asked > 0
