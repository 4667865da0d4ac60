"""Discovery and cordons over a store of records, whichever it is."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Generic, TypeVar

from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.card_publisher import HeldCards
from kvrouter.transports.discovery.card_tracker import TroubleSink, WatcherSinks
from kvrouter.transports.discovery.leased_watch import CardStore, LeasedWatch
from kvrouter.transports.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.discovery.records import OtherWrote, RecordStore
from kvrouter.transports.discovery.wire import CORDONS

T = TypeVar("T")
V = TypeVar("V")


class StoredDiscovery(Generic[V]):
    """Keeps the cards of one namespace as records of ``store``, which ends with it.

    A worker that dies is heard within ``lease_s`` and what it takes to ask the store, by the watchers' own
    clocks. ``lease_s`` is what this end's cards ask for; a watcher honours what each card asks for. A record
    that nobody writes for ``remove_after_s`` is removed, where the store doesn't do that itself.
    ``on_trouble`` hears of cards that cannot be written. ``cards`` are those that this process holds.
    """

    def __init__(
        self,
        store: CardStore[V],
        cards: HeldCards[V],
        *,
        lease_s: float,
        on_trouble: TroubleSink,
        remove_after_s: float = inf,
    ) -> None:
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

        What cannot be written is written with the next renewal that succeeds.
        """
        if self._renewing is None:
            self._renewing = go_on(self._renew_for_ever(), name="discovery: renew leases")
        await self._cards.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where that cannot be written, its lease runs out."""
        await self._cards.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it.

        Where the store does not answer, ``on_store`` hears that it is lost, and everything else when it is
        back.
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
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        self._is_closed = True
        watches, self._watches = self._watches, set()
        for watch in watches:
            watch.end()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for watch in watches:
            await watch.feed.ended()
        self._cards.let_go()
        await self._store.close()

    async def _renew_for_ever(self) -> None:
        failures: list[Exception] = []
        # A client may lose a cancellation that comes together with an answer: hence the flag.
        while not self._is_closed:
            await self._store.until_renewal(self._lease_s, failures)
            failures = await self._cards.renew()


class StoredCordons(Generic[V]):
    """Keeps cordons as records of ``store``, which ends with it. They have no lease, as cards have.

    ``why`` says of an error of the store what cannot be done.
    """

    look_s = 1.0

    def __init__(self, store: RecordStore[Cordon, V], *, why: Callable[[Exception], str]) -> None:
        self._store = store
        self._errors: tuple[type[Exception], ...] = (*store.errors, OtherWrote)
        self._why = why

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; nothing where none was ever written."""
        return tuple(record.value for record in await self._asked(self._store.list_all()))

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, over the one of the same level, name and source."""
        await self._asked(self._store.put(cordon))

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon of this level, name and source; idempotent."""
        await self._asked(self._store.delete(CORDONS.key_of(cordon)))

    async def close(self) -> None:
        """Hold nothing any more; idempotent."""
        await self._store.close()

    async def _asked(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except self._errors as error:
            raise CordonsUnavailable(self._why(error)) from error
