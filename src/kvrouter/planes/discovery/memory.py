"""Discovery inside one process."""

from collections.abc import Callable

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.discovery.port import CardSink, GoneSink


class MemoryDiscovery:
    """Cards in a dictionary; watchers are called before ``publish`` and ``withdraw`` return."""

    def __init__(self) -> None:
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._watchers: list[tuple[CardSink, GoneSink]] = []

    async def publish(self, card: WorkerCard) -> None:
        """Add the card or replace it; another incarnation of the same worker takes the old one's place."""
        old = self._cards.get(card.worker_id)
        self._cards[card.worker_id] = card
        for on_card, on_gone in list(self._watchers):
            if old is not None and old.incarnation != card.incarnation:
                on_gone(old.worker_id, old.incarnation)
            on_card(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card; idempotent; another incarnation's card stays."""
        card = self._cards.get(worker_id)
        if card is None or card.incarnation != incarnation:
            return
        del self._cards[worker_id]
        for _, on_gone in list(self._watchers):
            on_gone(worker_id, incarnation)

    async def watch(self, on_card: CardSink, on_gone: GoneSink) -> Callable[[], None]:
        """Deliver every present card, then every change; return the function that ends it."""
        watcher = (on_card, on_gone)
        for card in list(self._cards.values()):
            on_card(card)
        self._watchers.append(watcher)

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop
