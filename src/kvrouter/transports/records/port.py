"""The ports of discovery (which workers exist) and of the cordon store (which of them are cordoned)."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard


class Gone(StrEnum):
    """Why a card is gone: its worker withdrew it, its lease expired, or a newer incarnation replaced it."""

    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    REPLACED = "replaced"


CardSink = Callable[[WorkerCard], None]
GoneSink = Callable[[WorkerId, Epoch, Gone], None]
StoreSink = Callable[[bool, str], None]
"""(whether the store can be reached, the reason if not)."""


class Discovery(Protocol):
    """Publishes and watches worker cards. A card is identified by (worker id, incarnation).

    A published card is kept alive by a lease that the publisher renews until the card is withdrawn or the
    discovery is closed. While the store cannot be reached no worker expires: watchers are notified that the
    store is lost, and the fleet stays as it was. When the store is back, every lease restarts.
    """

    propagation_s: float
    """Seconds after which watchers that reach the store have read a card that was published; 0 where they
    have when ``publish`` returns.
    """

    async def publish(self, card: WorkerCard) -> None:
        """Add or replace the card: publishing the same incarnation again is an update."""

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card; idempotent; the card of a newer incarnation stays."""

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends the watch.

        ``on_store`` is called when the store is lost and when it is back.
        """

    async def close(self) -> None:
        """Stop renewing and watching. Cards that were not withdrawn expire."""


class CordonStore(Protocol):
    """Stores the cordons of one namespace for all its routers, across their restarts.

    Each cordon is one record, written and removed as a unit. Methods raise CordonsUnavailable when the store
    cannot be reached; a write that raises may have succeeded when only its answer was lost.
    """

    poll_s: float
    """Seconds between polls: a change takes effect at every router within this and one reading's time."""

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; an empty tuple where no cordon was ever written."""

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, replacing the one with the same level, name and source."""

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon with this level, name and source; idempotent."""
