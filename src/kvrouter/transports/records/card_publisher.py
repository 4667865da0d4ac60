"""Publishes the cards of one process to a store by compare-and-set.

All record stores share it. Each store decides when a card is renewed: how often it may be written to, and how
it reports that it is back.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.card_tracker import TroubleSink, claim, lost_why, still_claims
from kvrouter.transports.records.encoding import CARDS, CardRecord, encode_record
from kvrouter.transports.records.port import Gone, GoneSink
from kvrouter.transports.records.store import RecordStore, VersionConflict

WRITES_AT_ONCE = 64
WRITE_TRIES = 4
"""How often a write is retried after a conflict with another writer."""

Version = TypeVar("Version")


@dataclass(slots=True)
class _Held(Generic[Version]):
    """A card that this process renews. ``version`` is the store's version as last known."""

    record: CardRecord
    version: Version | None = None
    was_written: bool = False
    """Whether the card that this one updates was written."""

    is_written: bool = False
    is_over: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldCards(Generic[Version]):
    """The cards that this process published and did not withdraw.

    ``on_trouble`` is called once when cards cannot be written, and again only after all were written.
    ``on_lost`` is called for a card that lost its id for good, to a newer incarnation or a withdrawal.
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
        self._errors: tuple[type[Exception], ...] = (*store.errors, VersionConflict)
        self._lease_s = lease_s
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._held: dict[WorkerId, _Held[Version]] = {}
        self._is_failing = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and keep renewing it. A write of a replaced incarnation is ignored.

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
        """Stop renewing the card and mark it as withdrawn, whichever process published it."""
        held = self._held.get(worker_id)
        writing = asyncio.Lock()
        if held is not None and held.record.card.incarnation == incarnation:
            held.is_over = True
            writing = held.writing
            del self._held[worker_id]
        try:
            async with writing:  # a concurrent write would undo it
                await self._mark_withdrawn(worker_id, incarnation)
        except self._errors as error:
            self._on_trouble(f"worker {worker_id}", f"not withdrawn: {self._store.reason(error)}")

    async def renew(self) -> list[Exception]:
        """Write every card again; return the errors."""
        held = tuple(self._held.values())
        outcomes: list[Exception | None] = []
        for first in range(0, len(held), WRITES_AT_ONCE):
            outcomes += await asyncio.gather(*map(self._write, held[first : first + WRITES_AT_ONCE]))
        ids = [each.record.card.worker_id for each in held]
        self.note(dict(zip(ids, outcomes, strict=True)))
        return [failure for failure in outcomes if failure is not None]

    def clear(self) -> None:
        """Stop renewing all cards: their leases expire."""
        self._held.clear()

    async def _write(self, held: _Held[Version]) -> Exception | None:
        """Write the card; return the error, None on success. A card that lost its id is dropped."""
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
        """Replace the stored record; return how the card lost its id, None if it still has it."""
        worker_id = held.record.card.worker_id
        for _ in range(WRITE_TRIES):
            if held.is_over:
                return None
            try:
                held.version = await self._store.put_over(held.record, held.version)
            except VersionConflict:
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
            except VersionConflict:
                continue
            return
        raise _somebody_else(worker_id)

    def note_unannounced(self, card: WorkerCard, failure: Exception) -> None:
        """Report a card that was never written: its first write failed, and is retried."""
        self._is_failing = True
        self._on_trouble(f"worker {card.worker_id}", f"not announced yet: {self._store.reason(failure)}")

    def note(self, outcomes: Mapping[WorkerId, Exception | None]) -> None:
        """Report once that cards cannot be written, until all were written."""
        failures = [failure for failure in outcomes.values() if failure is not None]
        if failures and not self._is_failing:
            what = f"cards of {len(failures)} workers"
            self._on_trouble(what, f"not written: {self._store.reason(failures[0])}")
        self._is_failing = bool(failures)


def _somebody_else(worker_id: WorkerId) -> VersionConflict:
    return VersionConflict(f"somebody else writes the card of worker {worker_id} all the time")


def _checked(record: CardRecord) -> CardRecord:
    size_bytes = len(encode_record(record))
    if size_bytes > CARDS.bytes_max:
        raise ConfigError(f"the card has {size_bytes} bytes, more than {CARDS.bytes_max}", param="card")
    return record
