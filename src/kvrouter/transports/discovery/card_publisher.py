"""Publishes the cards of one process to a store, by compare-and-set alone.

Shared by the stores whose every write names what it writes over. When a card is renewed is the store's own
business: how often it may be asked, and how it reports that it is back.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.discovery.card_tracker import TroubleSink, claim, lost_why, still_claims
from kvrouter.transports.discovery.port import Gone, GoneSink
from kvrouter.transports.discovery.records import OtherWrote, RecordStore
from kvrouter.transports.discovery.wire import CARDS, CardRecord, encode_record

WRITES_AT_ONCE = 64
WRITE_TRIES = 4
"""How often a write is tried again because somebody else wrote meanwhile."""

Version = TypeVar("Version")


@dataclass(slots=True)
class _Held(Generic[Version]):
    """A card that is kept alive. ``version`` is what the store holds, as far as this process knows."""

    record: CardRecord
    version: Version | None = None
    was_written: bool = False
    """So was the card that this one updates."""

    is_written: bool = False
    is_over: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldCards(Generic[Version]):
    """The cards that this process published and did not withdraw.

    ``on_trouble`` hears of cards that cannot be written, once until they all can. ``on_lost`` hears of a card
    that lost its place for ever: to a newer incarnation, or because somebody else withdrew it.
    """

    def __init__(
        self,
        store: RecordStore[CardRecord, Version],
        *,
        lease_s: float,
        on_trouble: TroubleSink,
        on_lost: GoneSink | None,
    ) -> None:
        self._store = store
        self._errors: tuple[type[Exception], ...] = (*store.errors, OtherWrote)
        self._lease_s = lease_s
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._held: dict[WorkerId, _Held[Version]] = {}
        self._is_failing = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card, and hold it from now on. A write of a replaced incarnation is ignored.

        Raises ConfigError for a card that is too large.
        """
        known = self._held.get(card.worker_id)
        record = claim(card, self._lease_s, None if known is None else known.record)
        if record is None:
            return
        held: _Held[Version] = _Held(_checked(record))
        is_update = known is not None and known.record.card.incarnation == card.incarnation
        if known is not None:
            held.version = known.version
            held.was_written = is_update and (known.is_written or known.was_written)
            known.is_over = True
        self._held[card.worker_id] = held
        failure = await self._write(held)
        if failure is None or is_update:
            self.note({card.worker_id: failure})
        else:
            self.note_unannounced(card, failure)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Hold the card no more, and mark it as withdrawn, no matter which process published it."""
        held = self._held.get(worker_id)
        writing = asyncio.Lock()
        if held is not None and held.record.card.incarnation == incarnation:
            held.is_over = True
            writing = held.writing
            del self._held[worker_id]
        try:
            async with writing:  # a write that is under way would undo it
                await self._mark_withdrawn(worker_id, incarnation)
        except self._errors as error:
            self._on_trouble(f"worker {worker_id}", f"not withdrawn: {self._store.reason(error)}")

    async def renew(self) -> list[Exception]:
        """Write every card once more; return what went wrong."""
        held = tuple(self._held.values())
        outcomes: list[Exception | None] = []
        for first in range(0, len(held), WRITES_AT_ONCE):
            outcomes += await asyncio.gather(*map(self._write, held[first : first + WRITES_AT_ONCE]))
        ids = [each.record.card.worker_id for each in held]
        self.note(dict(zip(ids, outcomes, strict=True)))
        return [failure for failure in outcomes if failure is not None]

    def let_go(self) -> None:
        """Hold no card any more: their leases run out."""
        self._held.clear()

    async def _write(self, held: _Held[Version]) -> Exception | None:
        """Write the card; return what went wrong. A card that lost its place is not held any more."""
        async with held.writing:
            try:
                lost = await self._write_over(held)
            except self._errors as error:
                return error
        worker_id = held.record.card.worker_id
        if lost is not None and self._held.get(worker_id) is held:
            del self._held[worker_id]
            if held.is_written or held.was_written:
                self._on_trouble(f"worker {worker_id}", lost_why(lost))
                if self._on_lost is not None:
                    self._on_lost(worker_id, held.record.card.incarnation, lost)
        return None

    async def _write_over(self, held: _Held[Version]) -> Gone | None:
        """Write over what is there; return how the card lost its place, None if it has it."""
        worker_id = held.record.card.worker_id
        for _ in range(WRITE_TRIES):
            if held.is_over:
                return None
            try:
                held.version = await self._store.put_over(held.record, held.version)
            except OtherWrote:
                current, held.version = await self._store.read(str(worker_id))
                mine = held.record
                record = (
                    still_claims(mine, current)
                    if held.is_written
                    else claim(mine.card, mine.lease_s, current, mine) or Gone.REPLACED
                )
                if isinstance(record, Gone):
                    return record
                held.record = record
            else:
                held.is_written = True
                return None
        raise _somebody_else(worker_id)

    async def _mark_withdrawn(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        for _ in range(WRITE_TRIES):
            current, version = await self._store.read(str(worker_id))
            if current is None or current.card.incarnation != incarnation or current.withdrawn:
                return
            gone = CardRecord(current.card, current.lease_s, current.replaced, withdrawn=True)
            try:
                await self._store.put_over(gone, version)
            except OtherWrote:
                continue
            return
        raise _somebody_else(worker_id)

    def note_unannounced(self, card: WorkerCard, failure: Exception) -> None:
        """Report a card that nobody hears of yet: its first write failed, and is tried again."""
        self._is_failing = True
        self._on_trouble(f"worker {card.worker_id}", f"not announced yet: {self._store.reason(failure)}")

    def note(self, outcomes: Mapping[WorkerId, Exception | None]) -> None:
        """Report once that cards cannot be written, until they all can."""
        failures = [failure for failure in outcomes.values() if failure is not None]
        if failures and not self._is_failing:
            what = f"cards of {len(failures)} workers"
            self._on_trouble(what, f"not written: {self._store.reason(failures[0])}")
        self._is_failing = bool(failures)


def _somebody_else(worker_id: WorkerId) -> OtherWrote:
    return OtherWrote(f"somebody else writes the card of worker {worker_id} all the time")


def _checked(record: CardRecord) -> CardRecord:
    size_bytes = len(encode_record(record))
    if size_bytes > CARDS.bytes_max:
        raise ConfigError(f"the card has {size_bytes} bytes, more than {CARDS.bytes_max}", param="card")
    return record
