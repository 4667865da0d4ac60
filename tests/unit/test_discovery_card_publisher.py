"""Cards that a process holds in a store of compare-and-set, which here is a dict."""

import asyncio
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.discovery.card_publisher import WRITE_TRIES, HeldCards, OtherWrote
from kvrouter.transports.discovery.port import Gone
from kvrouter.transports.discovery.wire import RECORD_MAX_BYTES, CardRecord
from tests.support.discovery_stores import card

ONE = WorkerId(1)


@dataclass
class Shelf:
    """Keeps records in memory. ``is_away``: it cannot be asked. ``gate``: a write waits until it is open."""

    errors: tuple[type[Exception], ...] = (ConnectionError,)
    is_away: bool = False
    records: dict[WorkerId, tuple[CardRecord, int]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    written: list[WorkerCard] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def reason(self, error: Exception) -> str:
        return str(error)

    async def read(self, worker_id: WorkerId) -> tuple[CardRecord | None, int | None]:
        self._check()
        return self.records.get(worker_id, (None, None))

    async def write(self, record: CardRecord, over: int | None, *, number: int) -> int:
        self._check()
        self.asked.set()
        await self.gate.wait()
        worker_id = record.card.worker_id
        _, version = self.records.get(worker_id, (None, None))
        if version != over:
            raise OtherWrote("another one is there")
        self.numbers.append(number)
        self.written.append(record.card)
        self.records[worker_id] = record, (version or 0) + 1
        return (version or 0) + 1

    def _check(self) -> None:
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


async def test_each_renewal_is_reported_from_the_one_before_it() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card())
    await end.cards.renew()
    await end.cards.publish(card(draining=True))
    await end.cards.renew()
    assert shelf.numbers == [1, 2, 3, 4]
    assert shelf.records[ONE][0].card == card(draining=True)


async def test_a_write_that_is_under_way_does_not_undo_a_withdrawal() -> None:
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
    assert shelf.records[ONE][0].withdrawn
    assert await end.cards.renew() == []
    assert shelf.records[ONE][0].withdrawn


async def test_a_write_that_failed_is_not_tried_again_for_a_card_that_was_updated_meanwhile() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card())
    shelf.gate.clear()
    shelf.asked.clear()
    renewing = asyncio.create_task(end.cards.renew())
    await shelf.asked.wait()
    updating = asyncio.create_task(end.cards.publish(card(draining=True)))
    await asyncio.sleep(0)
    record, version = shelf.records[ONE]
    shelf.records[ONE] = record, version + 1
    shelf.written.clear()
    shelf.gate.set()
    await asyncio.gather(renewing, updating)
    assert shelf.written == [card(draining=True)]


async def test_what_was_replaced_here_is_not_written_any_more() -> None:
    shelf = Shelf()
    end = End(shelf)
    shelf.gate.clear()
    old = asyncio.create_task(end.cards.publish(card(1, Epoch(5))))
    await shelf.asked.wait()
    new = asyncio.create_task(end.cards.publish(card(1, Epoch(6))))
    shelf.gate.set()
    await asyncio.gather(old, new)
    record, _ = shelf.records[ONE]
    assert (record.card.incarnation, record.replaced) == (Epoch(6), (Epoch(5),))
    assert (await end.cards.renew(), end.lost) == ([], [])


async def test_a_newer_start_elsewhere_and_a_withdrawal_by_others_are_reported_once() -> None:
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
    assert shelf.records[ONE][0].card.incarnation == Epoch(6)


async def test_a_store_that_is_away_is_reported_once_and_nothing_is_lost() -> None:
    shelf = Shelf()
    end = End(shelf)
    await end.cards.publish(card(1))
    await end.cards.publish(card(2))
    shelf.is_away = True
    for _ in range(2):
        assert [str(error) for error in await end.cards.renew()] == ["away", "away"]
    assert end.troubles == [("cards of 2 workers", "not written: away")]
    shelf.is_away = False
    shelf.records.clear()
    assert await end.cards.renew() == []
    assert set(shelf.records) == {ONE, WorkerId(2)}


class Contested(Shelf):
    """Somebody else is always faster."""

    async def write(self, record: CardRecord, over: int | None, *, number: int) -> int:
        self.numbers.append(number)
        raise OtherWrote("another one is there")


async def test_a_place_that_others_write_all_the_time_is_given_up_for_now() -> None:
    shelf = Contested()
    end = End(shelf)
    await end.cards.publish(card())
    assert len(shelf.numbers) == WRITE_TRIES
    assert end.troubles == [
        ("worker 1", "not announced yet: somebody else writes the card of worker 1 all the time")
    ]


async def test_a_card_that_is_too_large_is_refused_and_not_held() -> None:
    shelf = Shelf()
    end = End(shelf)
    with pytest.raises(ConfigError, match=f"more than {RECORD_MAX_BYTES}"):
        await end.cards.publish(replace(card(), address="a" * RECORD_MAX_BYTES))
    assert await end.cards.renew() == []
    assert shelf.records == {}
