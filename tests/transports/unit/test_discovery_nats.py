"""The bucket of NATS: lost, frozen, emptied, deleted, filled with what does not belong there."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.records.encoding import CardRecord, encode_record
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.nats import NatsDiscovery
from kvrouter.transports.records.nats.store import BucketFeed
from kvrouter.transports.records.port import Gone
from tests.testing.discovery_stores import (
    LEASE_S,
    SHORT_LEASE_S,
    TOKEN,
    DiscoveryRecorder,
    NatsStore,
    card,
    ignore_reports,
    nats_connection,
    nats_store,
    record_discovery,
)
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until


@pytest.fixture
async def store(shared_nats: NatsServer) -> AsyncIterator[NatsStore]:
    """A store that no test loses."""
    async with nats_store(None, shared_nats) as made:
        yield made


@pytest.fixture
async def mortal(own_nats: NatsServer) -> AsyncIterator[NatsStore]:
    """A store with a server of its own."""
    async with nats_store(None, own_nats) as made:
        yield made


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("namespace", {"namespace": "a.b"}),
        ("namespace", {"namespace": "a>"}),
        ("namespace", {"namespace": ""}),
        ("lease_s", {"lease_s": 0.0}),
        ("replicas", {"replicas": 0}),
    ],
)
async def test_arguments_out_of_range_are_refused(
    store: NatsStore, param: str, changes: dict[str, object]
) -> None:
    arguments = {
        "namespace": "space",
        "token": TOKEN,
        "on_trouble": ignore_reports,
        "on_refused": ignore_reports,
        **changes,
    }
    with pytest.raises(ConfigError) as refused:
        NatsDiscovery(store.client(), **arguments)  # type: ignore[arg-type]
    assert refused.value.param == param


def sealed(store: NatsStore, key: str, worker: WorkerCard, *, number: int = 1, token: str = TOKEN) -> bytes:
    """What somebody with this token writes under a key."""
    record = encode_record(CardRecord(worker, LEASE_S))
    return MessageAuth(token, f"discovery 1 {store.namespace}").seal(key, record, number=number)


# The server is away


async def test_worker_started_while_nats_is_down_is_announced_afterwards(mortal: NatsStore) -> None:
    await mortal.lose()
    await until(lambda: not any(mortal.client().is_connected for _ in range(3)))
    recorder = await record_discovery(mortal.end())
    await mortal.end().publish(card())
    assert recorder.events == [False]
    assert [why for _, why in mortal.troubles] == ["not announced yet: not connected to NATS"]
    await mortal.bring_back(is_empty=True)
    await recorder.until_heard(False, True, card())


async def test_unresponsive_server_is_a_lost_store_and_expires_no_worker(mortal: NatsStore) -> None:
    await mortal.end(lease_s=SHORT_LEASE_S).publish(card())
    recorder = await record_discovery(mortal.end(lease_s=SHORT_LEASE_S))
    mortal.server.pause()
    await recorder.until(lambda: recorder.events[-1] is False)
    await asyncio.sleep(SHORT_LEASE_S)
    mortal.server.resume()
    await recorder.until(lambda: recorder.events[-1] is True)
    assert recorder.losses == []


async def test_quick_server_restart_removes_no_worker(mortal: NatsStore) -> None:
    worker = mortal.end()
    await worker.publish(card())
    recorder = await record_discovery(mortal.end())
    await asyncio.to_thread(mortal.server.restart)
    await until(lambda: all(mortal.client().is_connected for _ in range(3)))
    await worker.publish(card(draining=True))
    await recorder.until(lambda: card(draining=True) in recorder.events)
    assert recorder.losses == []


# The bucket is not what it was


async def quiet_lease(recorder: DiscoveryRecorder, worker: NatsDiscovery) -> None:
    """More than a lease passes, and nobody vanishes; then an update is heard."""
    await asyncio.sleep(1.3 * SHORT_LEASE_S)
    await worker.publish(card(draining=True))
    await recorder.until(lambda: card(draining=True) in recorder.events)
    assert recorder.losses == []


async def test_deleted_bucket_is_created_and_filled_again(store: NatsStore) -> None:
    worker = store.end(lease_s=SHORT_LEASE_S)
    for _ in range(50):
        await worker.publish(card())
    recorder = await record_discovery(store.end())
    await store.client().jetstream().delete_key_value(store.bucket)
    await quiet_lease(recorder, worker)


async def test_emptied_bucket_is_filled_again(store: NatsStore) -> None:
    worker = store.end(lease_s=SHORT_LEASE_S)
    await worker.publish(card())
    recorder = await record_discovery(store.end())
    await store.client().jetstream().purge_stream(f"KV_{store.bucket}")
    await quiet_lease(recorder, worker)


async def test_deleted_key_removes_no_worker_and_is_written_again(store: NatsStore) -> None:
    worker = store.end(lease_s=SHORT_LEASE_S)
    await worker.publish(card())
    recorder = await record_discovery(store.end())
    bucket = await store.client().jetstream().key_value(store.bucket)
    await bucket.delete("1")
    await quiet_lease(recorder, worker)


async def test_bucket_that_does_not_republish_is_a_lost_store(store: NatsStore) -> None:
    await store.client().jetstream().create_key_value(bucket=store.bucket)
    recorder = await record_discovery(store.end())
    assert recorder.events == [False]
    await store.client().jetstream().delete_key_value(store.bucket)
    await recorder.until_heard(False, True)


async def test_entries_that_are_not_cards_are_reported_once_and_ignored(store: NatsStore) -> None:
    worker = store.end()
    await worker.publish(card())
    recorder = await record_discovery(store.end())
    bucket = await store.client().jetstream().key_value(store.bucket)
    for _ in range(3):
        await bucket.put("notes", b"hello")
        await bucket.put("2", MessageAuth(TOKEN, f"discovery 1 {store.namespace}").seal("2", b"{"))
        await bucket.put("3", sealed(store, "3", card(1)))
    live = f"kvrouter.{store.namespace}.discovery.card.1"
    await store.client().publish(live, b"", headers={"KV-Operation": "DEL", "Nats-Sequence": "999"})
    await store.client().flush()
    await worker.publish(card(4))
    await recorder.until_heard(card(), card(4))
    assert len(store.refusals) == 3
    late = await record_discovery(store.end())
    assert late.events == [card(), card(4)]
    assert store.troubles == []


async def test_two_watches_of_a_process_report_a_bad_entry_once(store: NatsStore) -> None:
    end = store.end()
    ears = [await record_discovery(end), await record_discovery(end)]
    bucket = await store.client().jetstream().key_value(store.bucket)
    for number in (2, 3):
        await bucket.put("notes", b"hello")
        await bucket.put("1", b"{")
        await bucket.put("1", sealed(store, "1", card(1, number), number=number))
        for recorder in ears:
            await recorder.until(lambda recorder=recorder, number=number: card(1, number) in recorder.events)  # type: ignore[misc]
    assert [what.split()[1] for what, _ in store.refusals] == ["notes", "1", "1"]


async def test_worker_overwrites_a_bad_entry_under_its_key(store: NatsStore) -> None:
    recorder = await record_discovery(store.end())
    bucket = await store.client().jetstream().key_value(store.bucket)
    await bucket.put("1", b"{")
    await store.end().publish(card())
    await recorder.until_heard(card())


# Strangers, who may write into the bucket and have no token


async def test_entries_without_the_token_add_and_remove_no_worker(store: NatsStore) -> None:
    worker = store.end(lease_s=SHORT_LEASE_S)
    await worker.publish(card())
    recorder = await record_discovery(store.end())
    bucket = await store.client().jetstream().key_value(store.bucket)
    live = f"kvrouter.{store.namespace}.discovery.card"
    gone = encode_record(CardRecord(card(), LEASE_S, withdrawn=True))
    for value in (gone, sealed(store, "1", card(1, 10), token="guess"), b""):
        await bucket.put("1", value)
        await store.client().publish(f"{live}.1", value, headers={"Nats-Sequence": "999999"})
    await bucket.put("2", sealed(store, "2", card(2), token="guess"))
    await bucket.put("3", sealed(store, "1", card(3)))
    await quiet_lease(recorder, worker)
    assert recorder.events == [card(), card(draining=True)]
    assert {what.split()[1] for what, _ in store.refusals} == {"1", "2", "3"}
    assert all("KVROUTER_PLANE_TOKEN" in why for _, why in store.refusals)


async def test_replayed_cards_do_not_renew_a_lease(store: NatsStore) -> None:
    worker = store.end(lease_s=SHORT_LEASE_S)
    await worker.publish(card())
    bucket = await store.client().jetstream().key_value(store.bucket)
    first = await bucket.get("1")
    recorder = await record_discovery(store.end())
    await worker.publish(card(draining=True))
    await recorder.until_heard(card(), card(draining=True))
    last = await bucket.get("1")
    await worker.close()
    assert first.value is not None
    assert last.value is not None
    async with asyncio.timeout(60.0):
        while not recorder.losses:
            for value in (first.value, last.value):
                await bucket.put("1", value)
            await asyncio.sleep(0.05)
    assert recorder.events == [card(), card(draining=True), (1, 9, Gone.EXPIRED)]


# Leases


async def deafen(watch: LeasedWatch[int]) -> None:
    """The server says nothing to this watch any more."""
    assert isinstance(watch.feed, BucketFeed)
    assert watch.feed._listening is not None
    await watch.feed._listening.unsubscribe()


async def test_watcher_that_hears_nothing_asks_before_a_worker_expires(store: NatsStore) -> None:
    lives, dies = store.end(lease_s=SHORT_LEASE_S), store.end(lease_s=SHORT_LEASE_S)
    watcher = store.end()
    await lives.publish(card(1))
    await dies.publish(card(2))
    recorder = await record_discovery(watcher)
    for watch in watcher._watches:
        await deafen(watch)
    await dies.close()
    await recorder.until(lambda: bool(recorder.losses))
    assert recorder.losses == [(2, 9, Gone.EXPIRED)]


async def test_bucket_is_read_again_after_an_unnoticed_reconnection(store: NatsStore) -> None:
    async with nats_connection(store.server) as client:
        watcher = NatsDiscovery(
            client,
            namespace=store.namespace,
            token=TOKEN,
            on_trouble=ignore_reports,
            on_refused=ignore_reports,
            lease_s=LEASE_S,
        )
        recorder = await record_discovery(watcher)
        for watch in watcher._watches:
            await deafen(watch)
        await store.end().publish(card())
        client.stats["reconnects"] += 1
        await recorder.until_heard(card())
        await watcher.close()


async def test_expired_worker_is_not_reported_to_a_later_watcher(store: NatsStore) -> None:
    dies = store.end(lease_s=SHORT_LEASE_S)
    await dies.publish(card())
    recorder = await record_discovery(store.end())
    await dies.close()
    await recorder.until_heard(card(), (1, 9, Gone.EXPIRED))
    bucket = await store.client().jetstream().key_value(store.bucket)
    async with asyncio.timeout(60.0):
        while (await bucket.status()).values:  # noqa: ASYNC110 - a server forgets without a word
            await asyncio.sleep(0.05)
    late = await record_discovery(store.end())
    assert late.events == []


async def test_many_workers_that_die_at_once_all_expire(store: NatsStore) -> None:
    dies = store.end(lease_s=SHORT_LEASE_S)
    for number in range(300):
        await dies.publish(card(number))
    recorder = await record_discovery(store.end())
    await dies.close()
    expired = {(number, 9, Gone.EXPIRED) for number in range(300)}
    await recorder.until(lambda: set(recorder.losses) == expired)


async def test_exactly_one_of_many_simultaneous_starts_keeps_the_key(store: NatsStore) -> None:
    lost: list[Epoch] = []
    starts = [Epoch(number) for number in range(8)]
    ends = [
        store.end(on_lost=lambda _id, incarnation, _why: lost.append(incarnation), lease_s=SHORT_LEASE_S)
        for _ in starts
    ]
    recorder = await record_discovery(store.end())
    await asyncio.gather(*(end.publish(card(1, each)) for each, end in zip(starts, ends, strict=True)))
    await until(lambda: len(lost) == len(starts) - 1)
    (winner,) = set(starts) - set(lost)
    held = card(1, winner)
    await recorder.until(lambda: recorder.events[-1] == held)
    late = await record_discovery(store.end())
    assert late.events == [held]


async def test_withdrawal_while_nats_is_down_is_reported(mortal: NatsStore) -> None:
    worker = mortal.end(lease_s=SHORT_LEASE_S)
    await worker.publish(card())
    recorder = await record_discovery(mortal.end())
    await mortal.lose()
    await recorder.until_heard(card(), False)
    await until(lambda: not any(mortal.client().is_connected for _ in range(3)))
    await worker.publish(card(2))
    mortal.troubles.clear()
    for number in (1, 2):
        await worker.withdraw(WorkerId(number), card().incarnation)
    assert mortal.troubles == [
        (f"worker {number}", "not withdrawn: not connected to NATS") for number in (1, 2)
    ]
    await mortal.bring_back(is_empty=False)
    await until(lambda: all(mortal.client().is_connected for _ in range(3)))
    await recorder.until_heard(card(), False, True, (1, 9, Gone.EXPIRED))


async def test_a_connection_that_is_closed_is_a_lost_store(store: NatsStore) -> None:
    async with nats_connection(store.server) as client:
        end = NatsDiscovery(
            client,
            namespace=store.namespace,
            token=TOKEN,
            on_trouble=ignore_reports,
            on_refused=ignore_reports,
            lease_s=LEASE_S,
        )
        recorder = await record_discovery(end)
        await client.close()
        await recorder.until_heard(False)
        await end.close()
