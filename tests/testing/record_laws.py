"""What every store of records keeps."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from kvrouter.core.cordon_rules import Cordon
from kvrouter.transports.records.card_tracker import WatcherSinks
from kvrouter.transports.records.encoding import CORDONS, CardRecord
from kvrouter.transports.records.leased_watch import CardStore, LeasedWatch
from kvrouter.transports.records.store import RecordStore, VersionConflict
from tests.testing.discovery_stores import DiscoveryRecorder, card, ignore_reports

ZONE = Cordon("zone", "a", at_s=1_700_000_000.5, by="ann@desk", reason="maintenance of rack 4")
NODE = Cordon("node", "n1", at_s=1.0)


class RecordStores(NamedTuple):
    """What makes ends of one store of each kind, each as another process has it."""

    cards: Callable[[], CardStore[Any]]
    cordons: Callable[[], RecordStore[Cordon, Any]]


def record(worker_id: int = 1, incarnation: int = 9, *, draining: bool = False) -> CardRecord:
    return CardRecord(card(worker_id, incarnation, draining=draining), 60.0)


class RecordLaws:
    """The laws of :class:`~kvrouter.transports.records.store.RecordStore`. The fixture ``ends`` makes
    ends of a store that is empty.
    """

    async def test_a_created_record_is_visible_to_all(self, ends: RecordStores) -> None:
        one, other = ends.cards(), ends.cards()
        assert await other.read("1") == (None, None)
        version = await one.put_over(record(), None)
        await one.put_over(record(12), None)
        assert await other.read("1") == (record(), version)
        found = {each.key: (each.value, each.version) for each in await other.list_all()}
        assert found.keys() == {"1", "12"}
        assert found["1"] == (record(), version)

    async def test_only_the_current_version_can_be_overwritten(self, ends: RecordStores) -> None:
        one, other = ends.cards(), ends.cards()
        first = await one.put_over(record(), None)
        with pytest.raises(VersionConflict):
            await other.put_over(record(1, 10), None)
        second = await other.put_over(record(1, 10), first)
        with pytest.raises(VersionConflict):
            await one.put_over(record(), first)
        assert await one.read("1") == (record(1, 10), second)

    async def test_rewriting_an_unchanged_record_makes_a_new_version(self, ends: RecordStores) -> None:
        one, other = ends.cards(), ends.cards()
        versions = [await one.put_over(record(), None)]
        for _ in range(5):
            versions.append(await one.put_over(record(), versions[-1]))
            assert await other.read("1") == (record(), versions[-1])
        assert len(set(versions)) == len(versions)

    async def test_of_concurrent_writes_over_one_version_one_succeeds(self, ends: RecordStores) -> None:
        end = ends.cards()
        first = await end.put_over(record(), None)
        writes = [end.put_over(record(1, number), first) for number in range(10, 18)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(each, VersionConflict) for each in outcomes) == 7
        held, version = await end.read("1")
        assert held is not None
        assert outcomes[held.card.incarnation - 10] == version

    async def test_only_the_current_version_can_be_deleted(self, ends: RecordStores) -> None:
        one, other = ends.cards(), ends.cards()
        first = await one.put_over(record(), None)
        second = await one.put_over(record(draining=True), first)
        with pytest.raises(VersionConflict):
            await other.delete("1", first)
        assert await one.read("1") == (record(draining=True), second)
        await other.delete("1", second)
        assert (await one.read("1"))[0] is None
        assert await one.list_all() == []
        with pytest.raises(VersionConflict):
            await one.put_over(record(), second)
        await one.put_over(record(), (await one.read("1"))[1])
        assert [each.value for each in await other.list_all()] == [record()]

    async def test_an_unconditional_put_overwrites_any_version(self, ends: RecordStores) -> None:
        one, other = ends.cordons(), ends.cordons()
        assert await other.list_all() == []
        await one.put(ZONE)
        changed = structs.replace(ZONE, reason="fans")
        await other.put(changed)
        await other.put(NODE)
        found = {CORDONS.key_of(each.value): each.value for each in await one.list_all()}
        assert found == {CORDONS.key_of(ZONE): changed, CORDONS.key_of(NODE): NODE}
        for each in await other.list_all():
            await other.delete(each.key)
            await other.delete(each.key)
        assert await one.list_all() == []

    async def test_a_watch_lists_the_records_and_reports_every_change(self, ends: RecordStores) -> None:
        end, recorder = ends.cards(), DiscoveryRecorder()
        first = await end.put_over(record(), None)
        watch = LeasedWatch(
            ends.cards(),
            WatcherSinks(recorder.add, recorder.gone, recorder.store),
            remove_after_s=inf,
            on_trouble=ignore_reports,
        )
        await watch.feed.start()
        await recorder.until_heard(card())
        await end.put_over(record(draining=True), first)
        await recorder.until_heard(card(), card(draining=True))
        await end.put_over(record(2), None)
        await recorder.until_heard(card(), card(draining=True), card(2))
        watch.end()
        watch.end()
        await watch.feed.ended()
        await end.put_over(record(3), None)
        assert card(3) not in recorder.events
