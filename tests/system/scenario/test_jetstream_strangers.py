"""The JetStream transport when somebody writes where only workers and routers should."""

import base64
from collections.abc import AsyncIterator
from uuid import uuid4

import msgspec
import pytest
from msgspec import structs

from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import encode_batch
from kvrouter.transports.events.jetstream import JetStreamPublisher, snapshot_store
from kvrouter.transports.events.jetstream.stream import ComponentNames
from kvrouter.transports.events.port import DropReason
from tests.testing.constants import SetConstants
from tests.testing.event_transports import TOKEN, card, jetstream_transport, until_delivered
from tests.testing.jetstream_fleet import Fleet, Worker, fleet_on
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until

GARBAGE = [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"rank": [1, 0]}), b"\xff" * 4096]


@pytest.fixture
async def fleet(shared_nats: NatsServer) -> AsyncIterator[Fleet]:
    async with fleet_on(shared_nats.url) as opened:
        yield opened


def names_of(fleet: Fleet) -> ComponentNames:
    return ComponentNames(fleet.namespace, "backend")


async def write_garbage(fleet: Fleet, worker: Worker) -> None:
    """Among a rank's own batches, and one that is of another rank than its subject says."""
    rank = worker.card.ranks()[0]
    elsewhere = WorkerRank(WorkerId(99), DpRank(0))
    foreign = KvBatch(rank=elsewhere, epoch=worker.card.incarnation, first_event_id=EventId(0), events=())
    for payload in (*GARBAGE, encode_batch(foreign)):
        await fleet.client.jetstream().publish(names_of(fleet).events(rank), payload)


async def test_invalid_batches_are_reported_and_skipped_live_and_in_replay(fleet: Fleet) -> None:
    worker, (live,) = await fleet.known("live", serves=3, refused=True)
    await write_garbage(fleet, worker)
    worker.serve(3)
    await fleet.published()
    await live.until_right(worker)
    assert len(live.notes.refusals) >= len(GARBAGE)
    late = await fleet.knows("late", worker, refused=True)
    assert len(late.notes.refusals) >= len(GARBAGE)


async def test_a_workers_events_count_only_in_its_own_components_stream(
    shared_nats: NatsServer,
) -> None:
    async with jetstream_transport(shared_nats.url, f"other-{uuid4().hex}") as transport:
        heard: list[object] = []
        transport.subscriber.subscribe(heard.append, heard.append)
        other = JetStreamPublisher(
            transport.worker,
            namespace=transport.namespace,
            component="prefill",
            token=TOKEN,
            observer=transport.notes,
        )
        somebody = structs.replace(card(WorkerId(6), other.source), component="prefill")
        transport.subscriber.follow(somebody)
        await until_delivered(other, transport.subscriber, somebody.worker_id)
        heard.clear()
        rank = WorkerRank(WorkerId(4), DpRank(0))
        lie = KvBatch(rank, Epoch(1), EventId(7), ())
        other.publish(lie)
        other.publish_load(LoadReport(rank, 1, 100))
        await until(lambda: len(transport.foreign) == 2)
        assert {error.reason for error in transport.foreign} == {DropReason.OTHER_COMPONENT}
        assert all(str(rank) in error.message for error in transport.foreign)
        truth = KvBatch(rank, Epoch(1), EventId(8), ())
        transport.publisher.publish(truth)
        await until(lambda: bool(heard))
        assert heard == [truth]
        await other.close()


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[]", b'{"snapshot": 5}'])
async def test_an_invalid_snapshot_key_does_not_stop_routers(fleet: Fleet, body: bytes) -> None:
    worker, (first,) = await fleet.known("first", serves=5)
    keys = await fleet.client.jetstream().key_value(names_of(fleet).bucket)
    await keys.put("latest", body)
    late = await fleet.replica("late")
    late.join(worker)
    worker.serve(3)
    await first.until_right(worker)
    await late.until_right(worker)


async def test_an_overwritten_snapshot_part_makes_routers_ask_workers(fleet: Fleet) -> None:
    worker, (first,) = await fleet.known("first", serves=10)
    await until(lambda: first.is_right(worker))
    assert await first.snapshots.check() == 1
    objects = await fleet.client.jetstream().object_store(names_of(fleet).bucket)
    for each in await objects.list():
        assert each.name is not None
        if "part" in each.name:
            await objects.put(each.name, b"\xc1" * 100)
    late = await fleet.replica("late")
    late.join(worker)
    worker.serve(3)
    await first.until_right(worker)
    await late.until_right(worker)
    assert late.asking.asked > 0


async def test_a_too_large_snapshot_object_makes_routers_ask_workers(
    fleet: Fleet, set_constants: SetConstants
) -> None:
    worker, (first,) = await fleet.known("first", serves=10)
    await until(lambda: first.is_right(worker))
    assert await first.snapshots.check() == 1
    set_constants(snapshot_store, OBJECT_MAX_BYTES=100)
    late = await fleet.replica("late")
    late.join(worker)
    worker.serve(3)
    await late.until_right(worker)
    assert late.asking.asked > 0


@pytest.mark.parametrize("change", [{"digest": None}, {"digest": "SHA-256=x"}, {"nuid": None}, None], ids=str)
async def test_invalid_snapshot_metadata_makes_routers_ask_workers(
    fleet: Fleet, change: dict[str, str | None] | None
) -> None:
    worker, (first,) = await fleet.known("first", serves=10)
    await until(lambda: first.is_right(worker))
    assert await first.snapshots.check() == 1
    jetstream, bucket = fleet.client.jetstream(), names_of(fleet).bucket
    for each in await (await jetstream.object_store(bucket)).list():
        assert each.name is not None
        token = base64.urlsafe_b64encode(each.name.encode()).decode()
        subject = f"$O.{bucket}.M.{token}"
        about = (await jetstream.get_last_msg(f"OBJ_{bucket}", subject)).data
        assert about is not None
        other = b"no JSON" if change is None else msgspec.json.encode(msgspec.json.decode(about) | change)
        await jetstream.publish(subject, other, headers={"Nats-Rollup": "sub"})
    late = await fleet.replica("late")
    late.join(worker)
    worker.serve(3)
    await first.until_right(worker)
    await late.until_right(worker)
    assert late.asking.asked > 0
