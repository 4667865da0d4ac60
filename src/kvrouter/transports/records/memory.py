"""Discovery and cordons within one process, and discovery of a fixed list of workers."""

from collections import deque
from collections.abc import Callable, Sequence

from kvrouter.core.cordon_rules import Cordon, CordonSource
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.transports.registered import registered

REPLACED_MAX = 1024
"""How many replaced incarnations are remembered, over all workers."""


class MemoryDiscovery:
    """Holds the cards of one process; a change reaches every watcher before the call that made it returns.

    A card with another incarnation of a known worker id replaces the known one: watchers are notified that
    the old one is gone, then of the new card. Calls for a replaced incarnation are ignored.
    """

    propagation_s = 0.0

    def __init__(self) -> None:
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._replaced: deque[tuple[WorkerId, Epoch]] = deque(maxlen=REPLACED_MAX)
        self._watchers: dict[object, tuple[CardSink, GoneSink]] = {}

    async def publish(self, card: WorkerCard) -> None:
        """Add or replace the card: publishing the same incarnation again is an update."""
        if (card.worker_id, card.incarnation) in self._replaced:
            return
        known = self._cards.get(card.worker_id)
        if known is not None and known.incarnation != card.incarnation:
            self._replaced.append((known.worker_id, known.incarnation))
            self._remove(known, Gone.REPLACED)
        self._cards[card.worker_id] = card
        for on_card, _ in tuple(self._watchers.values()):
            on_card(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card; idempotent; the card of a newer incarnation stays."""
        known = self._cards.get(worker_id)
        if known is not None and known.incarnation == incarnation:
            self._remove(known, Gone.WITHDRAWN)

    async def watch(
        self,
        on_card: CardSink,
        on_gone: GoneSink,
        on_store: StoreSink | None = None,  # noqa: ARG002 - this store is never lost
    ) -> Callable[[], None]:
        """Deliver the present cards, then every change, in order; return the function that ends the watch."""
        for card in tuple(self._cards.values()):
            on_card(card)
        return registered(self._watchers, object(), (on_card, on_gone))

    async def close(self) -> None:
        """Stop all watches."""
        self._watchers.clear()

    def _remove(self, card: WorkerCard, why: Gone) -> None:
        del self._cards[card.worker_id]
        for _, on_gone in tuple(self._watchers.values()):
            on_gone(card.worker_id, card.incarnation, why)


class MemoryCordons:
    """Holds the cordons of one process, until it ends."""

    poll_s = 1.0

    def __init__(self) -> None:
        self._cordons: dict[tuple[str, str, CordonSource], Cordon] = {}

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon."""
        return tuple(self._cordons.values())

    async def put(self, cordon: Cordon) -> None:
        """Keep a cordon, replacing the one with the same level, name and source."""
        self._cordons[cordon.level, cordon.name, cordon.source] = cordon

    async def remove(self, cordon: Cordon) -> None:
        """Remove a cordon; idempotent."""
        self._cordons.pop((cordon.level, cordon.name, cordon.source), None)


class StaticDiscovery:
    """Discovery of a fixed list of cards: all are present from the beginning, and stay.

    The request transport finds out whether a worker answers. Publishing does nothing: a worker that is named
    by hand does not announce itself.
    """

    propagation_s = 0.0

    def __init__(self, cards: Sequence[WorkerCard] = ()) -> None:
        self._cards = tuple(cards)

    async def publish(self, card: WorkerCard) -> None:
        """Does nothing: the list is fixed."""

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Does nothing: the list is fixed."""

    async def watch(
        self,
        on_card: CardSink,
        on_gone: GoneSink,  # noqa: ARG002 - no worker ever leaves
        on_store: StoreSink | None = None,  # noqa: ARG002 - there is no store to be lost
    ) -> Callable[[], None]:
        """Deliver every card; there are no changes after that."""
        for card in self._cards:
            on_card(card)
        return lambda: None

    async def close(self) -> None:
        """Does nothing: there are no resources."""
