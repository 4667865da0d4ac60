"""One watcher's view of a store of cards: records, leases, and the notifications that follow from them."""

import asyncio
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.transports.records.card_tracker import CardLeases, TroubleSink, WatcherSinks
from kvrouter.transports.records.encoding import WORKERS_MAX, CardRecord
from kvrouter.transports.records.store import ChangeFeed, Record, RecordStore, VersionConflict

REMOVALS_AT_ONCE = 64
"""How many stale records one check removes."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Observed(Generic[V]):
    """The version of a record when it last changed, by this watcher's clock."""

    version: V
    at: float
    remove_after_s: float


class CardStore(RecordStore[CardRecord, V], Protocol):
    """A record store of cards that can be watched and renewed."""

    def changes(self, watch: "LeasedWatch[V]") -> ChangeFeed:
        """Return the feed that delivers the present records and every change to ``watch``."""

    async def until_renewal(self, lease_s: float, failures: list[Exception]) -> None:
        """Return when records with a lease of ``lease_s`` seconds are due for renewal; ``failures`` are the
        errors of the last renewal.
        """


class LeasedWatch(Generic[V]):
    """Follows the cards of a store and expires those whose lease ran out. Its feed calls it with what the
    store reports; times are seconds of the monotonic clock.

    A record that does not change for ``remove_after_s``, or for ten of its leases if that is longer, is
    removed from the store; ``on_trouble`` is called when that fails.
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
        self._observed: dict[str, _Observed[V]] = {}
        self._removes_at = 0.0
        self.feed = store.changes(self)

    def end(self) -> None:
        """Stop the watch; idempotent."""
        self._sinks.end()
        self.feed.end()

    # Called by the feed

    def check(self, now: float) -> None:
        """Record the time of a check, which extends leases after a pause of this process."""
        self._leases.check(now)

    def next_end(self) -> float | None:
        """When the next lease expires; None without leases, and while the store is lost."""
        return None if self._leases.is_lost else self._leases.next_end()

    def overdue(self, now: float) -> list[str]:
        """Return the keys whose lease ran out: the feed reads their records again before they expire."""
        return [str(worker_id) for worker_id in self._leases.overdue(now)]

    def __contains__(self, key: str) -> bool:
        return WorkerId(int(key)) in self._leases

    def take(self, record: Record[CardRecord, V]) -> None:
        """Take the current record of a key. Raises ProtocolError for more than ``WORKERS_MAX`` workers."""
        key, value, version = record
        if value.card.worker_id not in self._leases and len(self._leases) >= WORKERS_MAX:
            raise ProtocolError(f"more than {WORKERS_MAX} workers", param="worker_id")
        now = time.monotonic()
        observed = self._observed.get(key)
        if observed is None or observed.version != version:
            self._observed[key] = _Observed(version, now, max(self._remove_after_s, 10 * value.lease_s))
            self._sinks.changes(self._leases.observe(value, version, now))

    def drop(self, key: str) -> None:
        """Take a deletion. It does not remove the worker, because any process can delete: the worker's next
        renewal writes the record again, or its lease expires.
        """
        if self._observed.pop(key, None) is not None:
            self._leases.forget(self._present())

    def settle(self, asked_at: float, present: Container[str] | None = None) -> None:
        """Expire the leases that had run out at ``asked_at``. ``present``: all keys, after a complete
        read.
        """
        if present is not None:
            self._observed = {key: observed for key, observed in self._observed.items() if key in present}
            self._leases.forget(self._present())
        self._sinks.changes(self._leases.expire(asked_at))

    def drop_before(self, then: float) -> None:
        """Forget gone workers without a change since ``then``: the store has dropped them too."""
        self._leases.forget_before(then)
        if len(self._observed) > len(self._leases):
            self._observed = {key: observed for key, observed in self._observed.items() if key in self}

    def lose(self, why: str) -> None:
        """Mark the store as lost: no lease expires meanwhile."""
        if not self._leases.is_lost:
            self._leases.lose()
            self._sinks.store(False, why)

    def regain(self) -> None:
        """Mark the store as reachable: every lease restarts."""
        now, was_lost = time.monotonic(), self._leases.is_lost
        self._observed = {key: replace(observed, at=now) for key, observed in self._observed.items()}
        self._leases.regain(now)
        if was_lost:
            self._sinks.store(True, "")

    async def tidy(self, now: float) -> None:
        """Remove records that were not written for long, if they are still at the version last seen."""
        if now < self._removes_at:
            return
        self._removes_at = now + self._remove_after_s / 10
        old = [
            (key, observed)
            for key, observed in self._observed.items()
            if now - observed.at > observed.remove_after_s
        ]
        await asyncio.gather(
            *(self._remove(key, observed.version) for key, observed in old[:REMOVALS_AT_ONCE])
        )

    async def _remove(self, key: str, version: V) -> None:
        try:
            await self._store.delete(key, version)
        except VersionConflict:
            return
        except self._store.errors as error:
            why = f"its old {self._store.unit} cannot be removed: {self._store.reason(error)}"
            self._on_trouble(f"worker {key}", why)

    def _present(self) -> set[WorkerId]:
        return {WorkerId(int(key)) for key in self._observed}
