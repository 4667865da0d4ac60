"""Discovery and the cordon store over any ``RecordStore``."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Generic, TypeVar

from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.background import spawn
from kvrouter.transports.records.card_publisher import HeldCards
from kvrouter.transports.records.card_tracker import TroubleSink, WatcherSinks
from kvrouter.transports.records.encoding import CORDONS
from kvrouter.transports.records.leased_watch import CardStore, LeasedWatch
from kvrouter.transports.records.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.records.store import RecordStore, VersionConflict

T = TypeVar("T")
V = TypeVar("V")

PUSHED_WITHIN_S = 1.0
"""How long a store that pushes changes may take to reach every watcher. That is milliseconds; a busy server
or frontend takes longer. A watcher that has lost its connection reads changes when it is back.
"""


class StoredDiscovery(Generic[V]):
    """Discovery of one namespace over ``store``, which it closes at the end.

    Watchers notice a dead worker within its lease and the time of one poll, by their own clocks. ``lease_s``
    is the lease of the cards published here; a watcher applies the lease of each card. A record that is not
    written for ``remove_after_s`` seconds is removed, where the store doesn't expire records itself.
    ``on_trouble`` is called for cards that cannot be written. ``cards`` holds the cards of this process.
    ``propagation_s`` is the port's, by default that of a store that pushes changes.
    """

    def __init__(
        self,
        store: CardStore[V],
        cards: HeldCards[V],
        *,
        lease_s: float,
        on_trouble: TroubleSink,
        remove_after_s: float = inf,
        propagation_s: float = PUSHED_WITHIN_S,
    ) -> None:
        self.propagation_s = propagation_s
        self._store = store
        self._cards = cards
        self._lease_s = lease_s
        self._remove_after_s = remove_after_s
        self._on_trouble = on_trouble
        self._watches: set[LeasedWatch[V]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. A write of a replaced incarnation is ignored.

        A write that fails is repeated with the next renewal.
        """
        if self._renewing is None:
            self._renewing = spawn(self._renew_for_ever(), name="discovery: renew leases")
        await self._cards.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where the write fails, its lease expires."""
        await self._cards.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends the watch.

        Where the store cannot be reached, ``on_store`` is called first, and the cards follow when it is back.
        """
        watch = LeasedWatch(
            self._store,
            WatcherSinks(on_card, on_gone, on_store),
            remove_after_s=self._remove_after_s,
            on_trouble=self._on_trouble,
        )
        self._watches.add(watch)

        def end() -> None:
            self._watches.discard(watch)
            watch.end()

        try:
            await watch.feed.start()
        except BaseException:
            end()
            raise
        return end

    async def close(self) -> None:
        """Stop renewing and watching; idempotent. Cards that were not withdrawn expire."""
        self._is_closed = True
        watches, self._watches = self._watches, set()
        for watch in watches:
            watch.end()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for watch in watches:
            await watch.feed.ended()
        self._cards.clear()
        await self._store.close()

    async def _renew_for_ever(self) -> None:
        failures: list[Exception] = []
        # A client may lose a cancellation that comes together with an answer, so check a flag too.
        while not self._is_closed:
            await self._store.until_renewal(self._lease_s, failures)
            failures = await self._cards.renew()


class StoredCordons(Generic[V]):
    """Keeps cordons as records of ``store``, which it closes at the end. Cordons have no lease.

    ``why`` describes an error of the store to a person.
    """

    poll_s = 1.0

    def __init__(self, store: RecordStore[Cordon, V], *, why: Callable[[Exception], str]) -> None:
        self._store = store
        self._errors: tuple[type[Exception], ...] = (*store.errors, VersionConflict)
        self._why = why

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; an empty tuple where no cordon was ever written."""
        return tuple(record.value for record in await self._asked(self._store.list_all()))

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, replacing the one with the same level, name and source."""
        await self._asked(self._store.put(cordon))

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon with this level, name and source; idempotent."""
        await self._asked(self._store.delete(CORDONS.key_of(cordon)))

    async def close(self) -> None:
        """Close the store; idempotent."""
        await self._store.close()

    async def _asked(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except self._errors as error:
            raise CordonsUnavailable(self._why(error)) from error
