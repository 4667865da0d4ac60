"""The port of discovery: which workers exist."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard


class Gone(StrEnum):
    """Why a card is gone: its worker said goodbye, its lease ran out, or a newer incarnation came."""

    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    REPLACED = "replaced"


CardSink = Callable[[WorkerCard], None]
GoneSink = Callable[[WorkerId, Epoch, Gone], None]
StoreSink = Callable[[bool, str], None]
"""Whether the store answers, and why not."""


class Discovery(Protocol):
    """Publishes and watches worker cards. A card is identified by (worker id, incarnation).

    A published card is kept alive by a lease that this end renews until the card is withdrawn or the end is
    closed. While the store cannot be reached nobody vanishes: watchers are notified that the store is lost,
    and the fleet stays as it was. When the store is back, every lease has its whole length to be renewed.
    """

    async def publish(self, card: WorkerCard) -> None:
        """Add the card or replace it: a card published again with the same incarnation is an update."""

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card; idempotent; a newer incarnation's card stays."""

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it.

        ``on_store`` hears when the store is lost and when it is back.
        """

    async def close(self) -> None:
        """Renew nothing and watch nothing any more. Cards that were not withdrawn run out."""
