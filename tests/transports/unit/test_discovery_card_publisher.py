"""Cards that a process holds in a store of compare-and-set, which here is a dict."""

import asyncio
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.card_publisher import WRITE_TRIES, HeldCards
from kvrouter.transports.records.encoding import CARDS, RECORD_MAX_BYTES, CardRecord
from kvrouter.transports.records.port import Gone
from kvrouter.transports.records.store import VersionConflict
from tests.testing.discovery_stores import card
from tests.testing.memory_records import MemoryRecords

ONE = WorkerId(1)


class Shelf(MemoryRecords[CardRecord]):
    """A store that may be away. ``gate``: a write waits until it is open. ``written`` is what was written."""

    def __init__(self, *, is_away: bool = False) -> None:
        super().__init__(CARDS)
        self.is_away = is_away
        self.written: list[WorkerCard] = []
        self.tries = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    async def read(self, key: str) -> tuple[CardRecord | None, int | None]:
        self._check_reachable()
        return await super().read(key)

    async def put_over(self, value: CardRecord, over: int | None) -> int:
        self.tries += 1
        self._check_reachable()
        self.asked.set()
        await self.gate.wait()
        version = await super().put_over(value, over)
        self.written.append(value.card)
        return version

    async def held(self, worker_id: WorkerId = ONE) -> CardRecord:
        (record,) = [each.value for each in await self.list_all() if each.key == str(worker_id)]
        return record

    def _check_reachable(self) -> None:
        if self.is_away:
            raise ConnectionError("away")


@dataclass
class End:
    """One process's cards, and what it was reported."""

    shelf: Shelf
    troubles: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[WorkerId, Epoch, Gone]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cards = HeldCards(
            self.shelf,
            lease_s=10.0,
            on_trouble=lambda *trouble: self.troubles.append(trouble),
            on_lost=lambda *lost: self.lost.append(lost),
        )


async def test_each_publish_and_renewal_makes_a_new_version() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card())
    await end.cards.renew()
    await end.cards.publish(card(draining=True))
    await end.cards.renew()
    assert [record.version for record in await shelf.list_all()] == [4]
    assert (await shelf.held()).card == card(draining=True)


async def test_renewal_in_progress_does_not_undo_a_withdrawal() -> None:
    shelf = Shelf(is_away=True)
    end = End(shelf)
    await end.cards.publish(card())
    shelf.is_away = False
    shelf.gate.clear()
    renewing = asyncio.create_task(end.cards.renew())
    await shelf.asked.wait()
    withdrawing = asyncio.create_task(end.cards.withdraw(ONE, card().incarnation))
    await asyncio.sleep(0)
    shelf.gate.set()
    await asyncio.gather(renewing, withdrawing)
    assert (await shelf.held()).withdrawn
    assert await end.cards.renew() == []
    assert (await shelf.held()).withdrawn


async def test_failed_renewal_is_not_retried_after_the_card_was_updated() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card())
    shelf.gate.clear()
    shelf.asked.clear()
    renewing = asyncio.create_task(end.cards.renew())
    await shelf.asked.wait()
    updating = asyncio.create_task(end.cards.publish(card(draining=True)))
    await asyncio.sleep(0)
    await shelf.put(await shelf.held())
    shelf.written.clear()
    shelf.gate.set()
    await asyncio.gather(renewing, updating)
    assert shelf.written == [card(draining=True)]


async def test_card_replaced_in_the_same_process_is_not_written_again() -> None:
    shelf = Shelf()
    end = End(shelf)
    shelf.gate.clear()
    old = asyncio.create_task(end.cards.publish(card(1, Epoch(5))))
    await shelf.asked.wait()
    new = asyncio.create_task(end.cards.publish(card(1, Epoch(6))))
    shelf.gate.set()
    await asyncio.gather(old, new)
    record = await shelf.held()
    assert (record.card.incarnation, record.replaced) == (Epoch(6), (Epoch(5),))
    assert (await end.cards.renew(), end.lost) == ([], [])


async def test_replacement_and_withdrawal_by_others_are_reported_once() -> None:
    shelf = Shelf()
    first, second = End(shelf), End(shelf)
    await first.cards.publish(card(1, Epoch(5)))
    await first.cards.publish(card(2, Epoch(5)))
    await second.cards.publish(card(1, Epoch(6)))
    await second.cards.withdraw(WorkerId(2), Epoch(5))
    await first.cards.renew()
    await first.cards.renew()
    assert first.lost == [(ONE, Epoch(5), Gone.REPLACED), (WorkerId(2), Epoch(5), Gone.WITHDRAWN)]
    assert [what for what, _ in first.troubles] == ["worker 1", "worker 2"]
    assert (await shelf.held()).card.incarnation == Epoch(6)


async def test_unavailable_store_is_reported_once_and_cards_are_rewritten() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card(1))
    await end.cards.publish(card(2))
    shelf.is_away = True
    for _ in range(2):
        assert [str(error) for error in await end.cards.renew()] == ["away", "away"]
    assert end.troubles == [("cards of 2 workers", "not written: away")]
    shelf.is_away = False
    for key in "12":
        await shelf.delete(key)
    assert await end.cards.renew() == []
    assert {record.key for record in await shelf.list_all()} == {"1", "2"}


class Contested(Shelf):
    """Somebody else is always faster."""

    async def put_over(self, value: CardRecord, over: int | None) -> int:
        self.tries += 1
        raise VersionConflict("another one is there")


async def test_publish_gives_up_for_now_after_repeated_write_conflicts() -> None:
    shelf = Contested()
    end = End(shelf)
    await end.cards.publish(card())
    assert shelf.tries == WRITE_TRIES
    assert end.troubles == [
        ("worker 1", "not announced yet: somebody else writes the card of worker 1 all the time")
    ]


async def test_a_card_that_is_too_large_is_refused_and_not_held() -> None:
    shelf = Shelf()
    end = End(shelf)
    with pytest.raises(ConfigError, match=f"more than {RECORD_MAX_BYTES}"):
        await end.cards.publish(replace(card(), address="a" * RECORD_MAX_BYTES))
    assert await end.cards.renew() == []
    assert await shelf.list_all() == []
