"""Tracks the cards of a store for one watcher: leases, replacements, unreadable entries.

All record stores share it. It has no clock and does no I/O: a store passes in what it read and when, by the
watcher's own monotonic clock, and gets the changes back. A renewal is a stamp that differs from the last one,
so clocks of different hosts are never compared.
"""

import asyncio
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.encoding import CardRecord
from kvrouter.transports.records.port import CardSink, Gone, GoneSink, StoreSink

REPLACED_MAX = 16
"""How many replaced incarnations of one worker id a record keeps."""

RENEWALS_PER_LEASE = 3
"""Two renewals may be lost, or late, before a lease runs out."""

TroubleSink = Callable[[str, str], None]
"""(what, why): a problem for a person to look at, reported once and not at every scan.

A store has two: ``on_refused`` for entries that are no card, ``on_trouble`` for failed operations.
"""


def claim(
    card: WorkerCard, lease_s: float, current: CardRecord | None, mine: CardRecord | None = None
) -> CardRecord | None:
    """Return the record by which ``card`` takes the place of ``current``; None if ``current`` replaced it.

    ``mine`` is this process's previous record: it keeps ``replaced`` where the store lost its data.
    """
    replaced: list[Epoch] = []
    if current is not None:
        if card.incarnation in current.replaced:
            return None
        replaced += current.card.incarnation, *current.replaced
    if mine is not None and mine.card.incarnation == card.incarnation:
        replaced += mine.replaced
    others = [each for each in dict.fromkeys(replaced) if each != card.incarnation]
    return CardRecord(card, lease_s, tuple(others[:REPLACED_MAX]))


def still_claims(mine: CardRecord, current: CardRecord | None) -> CardRecord | Gone:
    """Return the record by which a renewing worker keeps its id, or how it lost the id.

    It loses the id to a newer incarnation, and by a withdrawal from any process.
    """
    if current is not None and current.withdrawn and current.card.incarnation == mine.card.incarnation:
        return Gone.WITHDRAWN
    return claim(mine.card, mine.lease_s, current, mine) or Gone.REPLACED


def lost_why(lost: Gone) -> str:
    """Return in words how a worker lost its id."""
    return (
        "withdrawn by somebody else" if lost is Gone.WITHDRAWN else "replaced by a newer start of the same id"
    )


@dataclass(frozen=True, slots=True)
class Left:
    """One incarnation of a worker is gone."""

    worker_id: WorkerId
    incarnation: Epoch
    why: Gone


Change = WorkerCard | Left


class _State(Enum):
    LIVE = auto()
    EXPIRED = auto()
    WITHDRAWN = auto()


@dataclass(slots=True)
class _Known:
    """The latest record of a worker id. A gone worker's record stays: an old stamp must not revive it."""

    record: CardRecord
    stamp: Hashable
    renewed_at: float
    state: _State

    @property
    def ends_at(self) -> float:
        return self.renewed_at + self.record.lease_s

    def leaves(self, why: Gone) -> Left:
        return Left(self.record.card.worker_id, self.record.card.incarnation, why)


class CardLeases:
    """The leases of all workers, as one watcher sees them. ``now`` is seconds of a monotonic clock.

    An expired worker that is withdrawn or replaced later is reported again with that reason: the router may
    have kept it because its connection was open.
    """

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Known] = {}
        self._checked_at: float | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the store cannot be reached: no lease expires then."""
        return self._is_lost

    def check(self, now: float) -> None:
        """Record a check at ``now``. After a pause of more than half a lease, that lease restarts."""
        before, self._checked_at = self._checked_at, now
        if before is None:
            return
        for known in self._known.values():
            if now - before > known.record.lease_s / 2:
                known.renewed_at = now

    def observe(self, record: CardRecord, stamp: Hashable, now: float) -> list[Change]:
        """Take the stored record of a worker id and return the changes; a known stamp changes nothing."""
        card = record.card
        known = self._known.get(card.worker_id)
        if known is None:
            state = _State.WITHDRAWN if record.withdrawn else _State.LIVE
            self._known[card.worker_id] = _Known(record, stamp, now, state)
            return [] if record.withdrawn else [card]
        if stamp == known.stamp:
            return []
        if known.state is _State.LIVE and card.incarnation in known.record.replaced:
            # After data loss the replaced incarnation may write to the store before the newer one does.
            return []
        changes: list[Change] = []
        is_other = card.incarnation != known.record.card.incarnation
        if is_other and known.state is not _State.WITHDRAWN:
            changes.append(known.leaves(Gone.REPLACED))
        if record.withdrawn:
            if not is_other and known.state is not _State.WITHDRAWN:
                changes.append(known.leaves(Gone.WITHDRAWN))
            known.state = _State.WITHDRAWN
        else:
            if known.state is not _State.LIVE or card != known.record.card:
                changes.append(card)
            known.state = _State.LIVE
        known.record, known.stamp, known.renewed_at = record, stamp, now
        return changes

    def forget(self, present: Container[WorkerId]) -> None:
        """Forget gone workers for which the store holds no record any more."""
        for worker_id in [each for each, known in self._known.items() if known.state is not _State.LIVE]:
            if worker_id not in present:
                del self._known[worker_id]

    def forget_before(self, then: float) -> None:
        """Forget gone workers whose record last changed before ``then``: the store has dropped them too."""
        for worker_id in [each for each, known in self._known.items() if known.state is not _State.LIVE]:
            if self._known[worker_id].renewed_at < then:
                del self._known[worker_id]

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def next_end(self) -> float | None:
        """When the next lease expires; None without leases."""
        return min((known.ends_at for known in self._live()), default=None)

    def overdue(self, now: float) -> list[WorkerId]:
        """Return the workers that :meth:`expire` would remove."""
        if self._is_lost:
            return []
        return [known.record.card.worker_id for known in self._live() if known.ends_at <= now]

    def expire(self, now: float) -> list[Change]:
        """Remove the workers whose lease ran out and return the changes; none while the store is lost."""
        if self._is_lost:
            return []
        over = [known for known in self._live() if known.ends_at <= now]
        for known in over:
            known.state = _State.EXPIRED
        return [known.leaves(Gone.EXPIRED) for known in over]

    def lose(self) -> None:
        """Mark the store as lost."""
        self._is_lost = True

    def regain(self, now: float) -> None:
        """Mark the store as reachable, or as a new one: every lease restarts."""
        self._is_lost = False
        self._checked_at = now
        for known in self._live():
            known.renewed_at = now

    def _live(self) -> Iterable[_Known]:
        return (known for known in self._known.values() if known.state is _State.LIVE)


class WatcherSinks:
    """The callbacks of one watcher. The event loop calls them in order; its handler gets their exceptions."""

    def __init__(self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None) -> None:
        self._on_card = on_card
        self._on_gone = on_gone
        self._on_store = on_store
        self._has_ended = False

    def end(self) -> None:
        """Stop delivering; idempotent."""
        self._has_ended = True

    def changes(self, changes: Iterable[Change]) -> None:
        """Deliver changes, in order."""
        loop = asyncio.get_running_loop()
        for change in changes:
            loop.call_soon(self._change, change)

    def store(self, is_reachable: bool, why: str) -> None:
        """Deliver that the store was lost, or is back."""
        asyncio.get_running_loop().call_soon(self._store, is_reachable, why)

    def _change(self, change: Change) -> None:
        if self._has_ended:
            return
        if isinstance(change, Left):
            self._on_gone(change.worker_id, change.incarnation, change.why)
        else:
            self._on_card(change)

    def _store(self, is_reachable: bool, why: str) -> None:
        if not self._has_ended and self._on_store is not None:
            self._on_store(is_reachable, why)


REFUSALS_MAX = 1024
"""How many unreadable entries are reported, and how many repaired ones are remembered with their version."""


class StoreRefusals:
    """Reports entries that hold no record, each once until it holds one, however many watches see it.

    Stores with ordered versions pass them: a report of an older version than a known good one is ignored.
    """

    def __init__(self, on_refused: TroubleSink) -> None:
        self._on_refused = on_refused
        self._reported: dict[str, int | None] = {}
        self._held: dict[str, int] = {}

    def report(self, key: str, what: str, why: str, *, version: int | None = None) -> None:
        """Report that ``key`` holds no record as of ``version``."""
        if version is not None and version < self._held.get(key, 0):
            return
        if key in self._reported:
            self._reported[key] = _later(version, self._reported[key])
        elif len(self._reported) < REFUSALS_MAX:
            self._reported[key] = version
            self._on_refused(what, why)

    def forget(self, key: str, *, version: int | None = None) -> None:
        """Note that ``key`` holds a record as of ``version``, or is gone."""
        if key not in self._reported:
            return
        reported = self._reported[key]
        if version is None or reported is None or version > reported:
            del self._reported[key]
            if version is not None:
                self._hold(key, version)

    def _hold(self, key: str, version: int) -> None:
        self._held.pop(key, None)
        self._held[key] = version
        if len(self._held) > REFUSALS_MAX:
            del self._held[next(iter(self._held))]


def _later(one: int | None, other: int | None) -> int | None:
    return one if other is None or (one is not None and one > other) else other
