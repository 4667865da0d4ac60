"""The ports of discovery: which workers exist, and which of them are cordoned."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvrouter.core.cordon_rules import Cordon
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


class CordonStore(Protocol):
    """Keeps the cordons of one namespace, for every router of it and over their restarts.

    Each cordon is one record, written and removed as a whole. Methods raise CordonsUnavailable when the store
    cannot be asked; a write that raises may have been done all the same where only its answer was lost.
    """

    look_s: float
    """How often readers look, in seconds: a change holds at every router within this and the time of one
    reading.
    """

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; nothing where none was ever written."""

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, over the one of the same level, name and source."""

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon of this level, name and source; idempotent."""
