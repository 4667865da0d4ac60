"""Tracks the cards of a store for one watcher: leases, replacements, unreadable entries.

Shared by the stores that hold records. There is no clock and no store in here: a store says what it saw and
when, by the watcher's own monotonic clock, and passes on the changes that come out. A renewal is a stamp that
differs from the last one; nobody's clock is compared with anybody else's.
"""

import asyncio
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.discovery.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.transports.discovery.wire import CardRecord

REPLACED_MAX = 16
"""How many replaced incarnations of one worker id a record remembers."""

RENEWALS_PER_LEASE = 3
"""Two renewals may be lost, or late, before a lease runs out."""

TroubleSink = Callable[[str, str], None]
"""(what, why): something that a person should look at; reported once, not at every scan.

A store has two of them: ``on_refused`` hears what is there and is no card, ``on_trouble`` what this process
could not do itself.
"""


def claim(
    card: WorkerCard, lease_s: float, current: CardRecord | None, mine: CardRecord | None = None
) -> CardRecord | None:
    """Return the record that puts ``card`` in the place of ``current``; None if that has replaced it.

    ``mine`` is what this process wrote for the card before: a store that lost everything has forgotten whom
    the card replaced.
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
    """Return the record by which a worker that renews holds its place, or how it lost that.

    It is lost to a newer incarnation, and by a withdrawal, no matter which process made it.
    """
    if current is not None and current.withdrawn and current.card.incarnation == mine.card.incarnation:
        return Gone.WITHDRAWN
    return claim(mine.card, mine.lease_s, current, mine) or Gone.REPLACED


def lost_why(lost: Gone) -> str:
    """How a worker lost its place, in words."""
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
    """The latest record of a worker id. One that is over is kept, lest an old stamp revive it."""

    record: CardRecord
    stamp: Hashable
    heard_at: float
    state: _State

    @property
    def ends_at(self) -> float:
        return self.heard_at + self.record.lease_s

    def leaves(self, why: Gone) -> Left:
        return Left(self.record.card.worker_id, self.record.card.incarnation, why)


class CardLeases:
    """One watcher's view of a store. Every method takes ``now``, in seconds of a monotonic clock.

    An expired worker that is withdrawn or replaced afterwards leaves once more, with that reason: somebody
    may have kept it for an open connection's sake.
    """

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Known] = {}
        self._looked_at: float | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the store cannot be reached: nobody expires."""
        return self._is_lost

    def look(self, now: float) -> None:
        """The watcher checks. One that slept too long to judge gives every lease its whole length."""
        before, self._looked_at = self._looked_at, now
        if before is None:
            return
        for known in self._known.values():
            if now - before > known.record.lease_s / 2:
                known.heard_at = now

    def hear(self, record: CardRecord, stamp: Hashable, now: float) -> list[Change]:
        """Take what the store holds for a worker id; a stamp that is known is no news."""
        card = record.card
        known = self._known.get(card.worker_id)
        if known is None:
            state = _State.WITHDRAWN if record.withdrawn else _State.LIVE
            self._known[card.worker_id] = _Known(record, stamp, now, state)
            return [] if record.withdrawn else [card]
        if stamp == known.stamp:
            return []
        if known.state is _State.LIVE and card.incarnation in known.record.replaced:
            # A store that lost everything may be filled by the replaced one before the other comes.
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
        known.record, known.stamp, known.heard_at = record, stamp, now
        return changes

    def forget(self, present: Container[WorkerId]) -> None:
        """Drop the memory of workers that are over and of which the store holds nothing any more."""
        for worker_id in [each for each, known in self._known.items() if known.state is not _State.LIVE]:
            if worker_id not in present:
                del self._known[worker_id]

    def forget_before(self, then: float) -> None:
        """Drop the memory of workers not heard of since ``then`` and over: their store has dropped it too."""
        for worker_id in [each for each, known in self._known.items() if known.state is not _State.LIVE]:
            if self._known[worker_id].heard_at < then:
                del self._known[worker_id]

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def next_end(self) -> float | None:
        """When the first lease runs out; None without one."""
        return min((known.ends_at for known in self._live()), default=None)

    def overdue(self, now: float) -> list[WorkerId]:
        """Whom :meth:`expire` would take away."""
        if self._is_lost:
            return []
        return [known.record.card.worker_id for known in self._live() if known.ends_at <= now]

    def expire(self, now: float) -> list[Change]:
        """Take away the workers whose lease ran out; nobody while the store is lost."""
        if self._is_lost:
            return []
        over = [known for known in self._live() if known.ends_at <= now]
        for known in over:
            known.state = _State.EXPIRED
        return [known.leaves(Gone.EXPIRED) for known in over]

    def lose(self) -> None:
        """The store cannot be reached."""
        self._is_lost = True

    def regain(self, now: float) -> None:
        """The store is back, or is another one: every lease has its whole length to be renewed."""
        self._is_lost = False
        self._looked_at = now
        for known in self._live():
            known.heard_at = now

    def _live(self) -> Iterable[_Known]:
        return (known for known in self._known.values() if known.state is _State.LIVE)


class WatcherSinks:
    """One watcher's sinks. They run on the loop one after the other; what one raises goes to its handler."""

    def __init__(self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None) -> None:
        self._on_card = on_card
        self._on_gone = on_gone
        self._on_store = on_store
        self._has_ended = False

    def end(self) -> None:
        """Deliver nothing any more; idempotent."""
        self._has_ended = True

    def changes(self, changes: Iterable[Change]) -> None:
        """Pass on what changed, in order."""
        loop = asyncio.get_running_loop()
        for change in changes:
            loop.call_soon(self._change, change)

    def store(self, is_reachable: bool, why: str) -> None:
        """Pass on that the store was lost, or is back."""
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
"""How many places that hold no card are reported; of as many that hold one again it is known since when."""


class StoreRefusals:
    """Reports places that hold no card, each once until it holds one, however many watches see it.

    Where versions of a store have an order, they are given: a watch that is behind another says nothing new.
    """

    def __init__(self, on_refused: TroubleSink) -> None:
        self._on_refused = on_refused
        self._reported: dict[str, int | None] = {}
        self._held: dict[str, int] = {}

    def tell(self, key: str, what: str, why: str, *, version: int | None = None) -> None:
        """``key`` holds no card as of ``version``."""
        if version is not None and version < self._held.get(key, 0):
            return
        if key in self._reported:
            self._reported[key] = _later(version, self._reported[key])
        elif len(self._reported) < REFUSALS_MAX:
            self._reported[key] = version
            self._on_refused(what, why)

    def forget(self, key: str, *, version: int | None = None) -> None:
        """``key`` holds a card as of ``version``, or is gone."""
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
