"""What every discovery promises, whatever its store is.

A class of tests is made of these by a subclass with the fixture ``store``.
"""

import asyncio

import pytest

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.port import Discovery, Gone
from tests.testing.cancellation import cancelled_at_each_await
from tests.testing.discovery_stores import (
    POLL_S,
    SHORT_LEASE_S,
    DiscoveryRecorder,
    MemoryStore,
    Store,
    card,
    record_discovery,
)

OLD, NEW = Epoch(9), Epoch(2)
ONE, TWO = WorkerId(1), WorkerId(2)


class CardLaws:
    """Of a store that nobody loses."""

    @pytest.fixture
    def discovery(self, store: Store) -> Discovery:
        """The end of the workers."""
        return store.end()

    async def test_present_cards_come_first_then_changes_in_order(
        self, store: Store, discovery: Discovery
    ) -> None:
        await discovery.publish(card(1))
        await discovery.publish(card(2))
        recorder = await record_discovery(store.end())
        assert recorder.events == [card(1), card(2)]
        await discovery.publish(card(3))
        await recorder.until_heard(card(1), card(2), card(3))
        await discovery.withdraw(ONE, OLD)
        await recorder.until_heard(card(1), card(2), card(3), (1, OLD, Gone.WITHDRAWN))

    async def test_a_publisher_can_watch_too(self, discovery: Discovery) -> None:
        recorder = await record_discovery(discovery)
        await discovery.publish(card())
        await recorder.until_heard(card())

    async def test_a_card_takes_time_to_watchers_unless_they_have_it_when_publish_returns(
        self, store: Store, discovery: Discovery
    ) -> None:
        recorder = await record_discovery(store.end())
        await discovery.publish(card())
        takes_time = discovery.propagation_s > 0
        assert takes_time is not isinstance(store, MemoryStore), "a drain in one process is read at once"
        assert takes_time or recorder.events == [card()]

    async def test_a_card_of_the_same_incarnation_is_an_update(
        self, store: Store, discovery: Discovery
    ) -> None:
        recorder = await record_discovery(store.end())
        await discovery.publish(card())
        await recorder.until_heard(card())
        await discovery.publish(card(draining=True))
        await recorder.until_heard(card(), card(draining=True))
        later = await record_discovery(store.end())
        assert later.events == [card(draining=True)]

    @pytest.mark.parametrize("is_same_process", [True, False])
    async def test_a_card_of_another_incarnation_is_another_worker(
        self, store: Store, discovery: Discovery, is_same_process: bool
    ) -> None:
        recorder = await record_discovery(store.end())
        await discovery.publish(card())
        await recorder.until_heard(card())
        await (discovery if is_same_process else store.end()).publish(card(incarnation=NEW))
        await recorder.until_heard(card(), (1, OLD, Gone.REPLACED), card(incarnation=NEW))

    @pytest.mark.parametrize("is_same_process", [True, False])
    async def test_an_older_incarnation_replaces_and_removes_nothing(
        self, store: Store, discovery: Discovery, is_same_process: bool
    ) -> None:
        recorder = await record_discovery(store.end())
        await discovery.publish(card())
        await recorder.until_heard(card())
        newer = discovery if is_same_process else store.end()
        await newer.publish(card(incarnation=NEW))
        await recorder.until(lambda: card(incarnation=NEW) in recorder.events)
        for end in (discovery, store.end()):
            await end.withdraw(ONE, OLD)
            await end.publish(card(draining=True))
        await newer.publish(card(2))
        await recorder.until_heard(card(), (1, OLD, Gone.REPLACED), card(incarnation=NEW), card(2))
        later = await record_discovery(store.end())
        assert later.events == [card(incarnation=NEW), card(2)]

    async def test_withdrawing_is_idempotent(self, store: Store, discovery: Discovery) -> None:
        await discovery.publish(card())
        recorder = await record_discovery(store.end())
        await discovery.withdraw(ONE, OLD)
        await discovery.withdraw(ONE, OLD)
        await store.end().withdraw(ONE, OLD)
        await discovery.withdraw(WorkerId(8), OLD)
        await discovery.publish(card(2))
        await recorder.until_heard(card(), (1, OLD, Gone.WITHDRAWN), card(2))

    async def test_another_process_can_withdraw_a_worker(self, store: Store) -> None:
        discovery = store.end(lease_s=SHORT_LEASE_S)
        await discovery.publish(card())
        recorder = await record_discovery(store.end())
        await store.end().withdraw(ONE, OLD)
        await asyncio.sleep(SHORT_LEASE_S / 2)
        await discovery.publish(card(2))
        await recorder.until_heard(card(), (1, OLD, Gone.WITHDRAWN), card(2))

    async def test_a_withdrawn_worker_can_register_again(self, store: Store, discovery: Discovery) -> None:
        await discovery.publish(card())
        watching = await record_discovery(store.end())
        await discovery.withdraw(ONE, OLD)
        await watching.until_heard(card(), (1, OLD, Gone.WITHDRAWN))
        late = await record_discovery(store.end())
        assert late.events == []
        await discovery.publish(card())
        await late.until_heard(card())
        await watching.until_heard(card(), (1, OLD, Gone.WITHDRAWN), card())

    async def test_a_watch_cancelled_during_its_start_reports_nothing(
        self, store: Store, discovery: Discovery
    ) -> None:
        recorder, other, watcher = DiscoveryRecorder(), await record_discovery(store.end()), store.end()
        async for end in cancelled_at_each_await(
            lambda: watcher.watch(recorder.add, recorder.gone, recorder.store)
        ):
            if end is not None:
                end()
        await discovery.publish(card())
        await other.until_heard(card())
        later = await record_discovery(watcher)
        assert later.events == [card()]
        await asyncio.sleep(3 * POLL_S)
        assert recorder.events == []

    async def test_an_ended_watch_reports_nothing_and_can_end_twice(
        self, store: Store, discovery: Discovery
    ) -> None:
        end = store.end()
        deaf, hears = await record_discovery(end), await record_discovery(end)
        deaf.end()
        deaf.end()
        await discovery.publish(card())
        await hears.until_heard(card())
        assert deaf.events == []

    async def test_a_watch_starts_with_all_of_a_thousand_workers(
        self, store: Store, discovery: Discovery
    ) -> None:
        cards = [card(number) for number in range(1000)]
        await asyncio.gather(*map(discovery.publish, cards))
        recorder = await record_discovery(store.end())
        # On a slow machine the first have run out by now, and come again.
        await recorder.until(lambda: len(recorder.events) >= len(cards))
        assert {each.worker_id for each in recorder.events if isinstance(each, WorkerCard)} == set(
            range(1000)
        )


class LeaseLaws:
    """Of a store that is outside of the processes that use it; each test may lose it."""

    async def test_only_an_unrenewed_lease_expires_and_its_worker_can_return(self, store: Store) -> None:
        lives, dies = store.end(lease_s=SHORT_LEASE_S), store.end(lease_s=SHORT_LEASE_S)
        await lives.publish(card(1))
        await dies.publish(card(2))
        recorder = await record_discovery(store.end())
        await dies.close()
        await recorder.until(lambda: recorder.of(TWO) == [card(2), (2, 9, Gone.EXPIRED)])
        await store.end().publish(card(2))
        await recorder.until(lambda: recorder.of(TWO) == [card(2), (2, 9, Gone.EXPIRED), card(2)])
        # On a slow machine a renewal is late; the first that comes brings the worker back.
        await recorder.until(lambda: recorder.of(ONE)[-1] == card(1))

    async def test_an_expired_worker_that_restarts_is_replaced(self, store: Store) -> None:
        dies = store.end(lease_s=SHORT_LEASE_S)
        await dies.publish(card(2))
        recorder = await record_discovery(store.end())
        await dies.close()
        await recorder.until_heard(card(2), (2, 9, Gone.EXPIRED))
        await store.end().publish(card(2, 10))
        await recorder.until(lambda: card(2, 10) in recorder.events)
        assert set(recorder.losses[1:]) <= {(2, 9, Gone.REPLACED)}

    async def test_no_worker_expires_while_the_store_is_unreachable(self, store: Store) -> None:
        lives, dies = store.end(), store.end(lease_s=SHORT_LEASE_S)
        await lives.publish(card(1))
        await dies.publish(card(2))
        recorder = await record_discovery(store.end())
        await store.lose()
        await recorder.until_heard(card(1), card(2), False)
        await dies.close()
        await asyncio.sleep(1.5 * SHORT_LEASE_S)
        await recorder.until_heard(card(1), card(2), False)
        await store.bring_back(is_empty=False)
        await recorder.until_heard(card(1), card(2), False, True, (2, 9, Gone.EXPIRED))
        late = await record_discovery(store.end())
        assert card(1) in late.events

    async def test_workers_register_again_in_a_store_that_returns_empty(self, store: Store) -> None:
        lives = store.end()
        await lives.publish(card(1))
        await lives.publish(card(2))
        recorder = await record_discovery(store.end())
        await store.lose()
        await recorder.until_heard(card(1), card(2), False)
        await store.bring_back(is_empty=True)
        await recorder.until_heard(card(1), card(2), False, True)
        late = await record_discovery(store.end())
        await late.until(lambda: card(1) in late.events and card(2) in late.events)
        await lives.publish(card(3))
        await recorder.until_heard(card(1), card(2), False, True, card(3))
