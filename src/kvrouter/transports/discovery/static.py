"""Discovery without a store: workers given by flags."""

from collections.abc import Callable, Sequence

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.discovery.port import CardSink, GoneSink, StoreSink


class StaticDiscovery:
    """Holds the cards that it is made with: they are there from the beginning, and stay.

    Whether a worker answers is for the request plane to find out. What is published here nobody hears: a
    worker that was named by hand does not announce itself.
    """

    def __init__(self, cards: Sequence[WorkerCard] = ()) -> None:
        self._cards = tuple(cards)

    async def publish(self, card: WorkerCard) -> None:
        """Nobody listens."""

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Nobody listens."""

    async def watch(
        self,
        on_card: CardSink,
        on_gone: GoneSink,  # noqa: ARG002 - nobody ever leaves
        on_store: StoreSink | None = None,  # noqa: ARG002 - there is no store to be lost
    ) -> Callable[[], None]:
        """Deliver every card; nothing changes after that."""
        for card in self._cards:
            on_card(card)
        return lambda: None

    async def close(self) -> None:
        """Nothing is held."""
