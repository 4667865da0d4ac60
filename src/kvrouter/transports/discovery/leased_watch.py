"""The watch of a store of cards: what it holds, as one watcher is notified of it."""

import asyncio
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.transports.discovery.card_tracker import CardLeases, TroubleSink, WatcherSinks
from kvrouter.transports.discovery.records import ChangeFeed, OtherWrote, Record, RecordStore
from kvrouter.transports.discovery.wire import WORKERS_MAX, CardRecord

REMOVALS_AT_ONCE = 64
"""How many records that nobody renews are removed in one check."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Seen(Generic[V]):
    """A record as it was last seen to change."""

    version: V
    at: float
    remove_after_s: float


class CardStore(RecordStore[CardRecord, V], Protocol):
    """A store of cards, whose changes are followed, and which are renewed."""

    def changes(self, watch: "LeasedWatch[V]") -> ChangeFeed:
        """Return what brings ``watch`` the records that are there, and every change."""

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return when records whose lease is ``lease_s`` seconds are to be written again; ``failures`` are
        those of the last time.
        """


class LeasedWatch(Generic[V]):
    """Follows the cards of a store, and takes away those whose lease ran out. Its feed reports what the store
    says; times are seconds of the monotonic clock.

    A record that does not change for ``remove_after_s``, or for ten of its leases if that is more, is
    removed, where the store is tidied; ``on_trouble`` hears of one that cannot be.
    """

    def __init__(
        self,
        store: CardStore[V],
        sinks: WatcherSinks,
        *,
        remove_after_s: float,
        on_trouble: TroubleSink,
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._remove_after_s = remove_after_s
        self._on_trouble = on_trouble
        self._leases = CardLeases()
        self._seen: dict[str, _Seen[V]] = {}
        self._removes_at = 0.0
        self.feed = store.changes(self)

    def end(self) -> None:
        """Watch no more; idempotent."""
        self._sinks.end()
        self.feed.end()

    # What the store says

    def look(self, now: float) -> None:
        """See which leases run out."""
        self._leases.look(now)

    def next_end(self) -> float | None:
        """When the first lease runs out; None without one, or while the store is lost."""
        return None if self._leases.is_lost else self._leases.next_end()

    def overdue(self, now: float) -> list[str]:
        """Whose lease ran out: the record is read again before that is believed."""
        return [str(worker_id) for worker_id in self._leases.overdue(now)]

    def __contains__(self, key: str) -> bool:
        return WorkerId(int(key)) in self._leases

    def take(self, record: Record[CardRecord, V]) -> None:
        """Take a record as it is now. Raises ProtocolError for one worker more than are followed."""
        key, value, version = record
        if value.card.worker_id not in self._leases and len(self._leases) >= WORKERS_MAX:
            raise ProtocolError(f"more than {WORKERS_MAX} workers", param="worker_id")
        now = time.monotonic()
        seen = self._seen.get(key)
        if seen is None or seen.version != version:
            self._seen[key] = _Seen(version, now, max(self._remove_after_s, 10 * value.lease_s))
            self._sinks.changes(self._leases.hear(value, version, now))

    def drop(self, key: str) -> None:
        """A record that was deleted says nothing: anybody can delete. Its worker's next renewal writes it
        again, or its lease runs out.
        """
        if self._seen.pop(key, None) is not None:
            self._leases.forget(self._present())

    def settle(self, asked_at: float, present: Container[str] | None = None) -> None:
        """Believe the leases that had run out at ``asked_at``. ``present`` are the keys of all records, where
        all were read.
        """
        if present is not None:
            self._seen = {key: seen for key, seen in self._seen.items() if key in present}
            self._leases.forget(self._present())
        self._sinks.changes(self._leases.expire(asked_at))

    def drop_before(self, then: float) -> None:
        """Remember nobody who is over and was not heard of since ``then``: the store has dropped it too."""
        self._leases.forget_before(then)
        if len(self._seen) > len(self._leases):
            self._seen = {key: seen for key, seen in self._seen.items() if key in self}

    def lose(self, why: str) -> None:
        """The store cannot be asked: nobody vanishes."""
        if not self._leases.is_lost:
            self._leases.lose()
            self._sinks.store(False, why)

    def regain(self) -> None:
        """Every lease has its whole length to be renewed."""
        now, was_lost = time.monotonic(), self._leases.is_lost
        self._seen = {key: replace(seen, at=now) for key, seen in self._seen.items()}
        self._leases.regain(now)
        if was_lost:
            self._sinks.store(True, "")

    async def tidy(self, now: float) -> None:
        """Remove records that nobody has written for long, as they were last seen."""
        if now < self._removes_at:
            return
        self._removes_at = now + self._remove_after_s / 10
        old = [(key, seen) for key, seen in self._seen.items() if now - seen.at > seen.remove_after_s]
        await asyncio.gather(*(self._remove(key, seen.version) for key, seen in old[:REMOVALS_AT_ONCE]))

    async def _remove(self, key: str, version: V) -> None:
        try:
            await self._store.delete(key, version)
        except OtherWrote:
            return
        except self._store.errors as error:
            why = f"its old {self._store.unit} cannot be removed: {self._store.reason(error)}"
            self._on_trouble(f"worker {key}", why)

    def _present(self) -> set[WorkerId]:
        return {WorkerId(int(key)) for key in self._seen}
