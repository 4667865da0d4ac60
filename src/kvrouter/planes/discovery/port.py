"""Discovery: which workers are there."""

from collections.abc import Callable
from typing import Protocol

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard

CardSink = Callable[[WorkerCard], None]
GoneSink = Callable[[WorkerId, Epoch], None]


class Discovery(Protocol):
    """Publishes and watches worker cards. A card is identified by (worker id, incarnation)."""

    async def publish(self, card: WorkerCard) -> None:
        """Add the card or replace it: a card published again with the same incarnation is an update."""

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card; idempotent; a newer incarnation's card stays."""

    async def watch(self, on_card: CardSink, on_gone: GoneSink) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it."""
