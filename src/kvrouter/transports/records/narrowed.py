"""Discovery that delivers some workers only."""

from collections.abc import Callable

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.port import CardSink, Discovery, GoneSink, StoreSink


class NarrowedDiscovery:
    """Delivers the cards for which ``takes`` returns True; passes everything else on."""

    def __init__(self, discovery: Discovery, takes: Callable[[WorkerCard], bool]) -> None:
        self._discovery = discovery
        self._takes = takes
        self.propagation_s = discovery.propagation_s

    async def publish(self, card: WorkerCard) -> None:
        """Pass on to the discovery."""
        await self._discovery.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Pass on to the discovery."""
        await self._discovery.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver only the cards that ``takes`` accepts."""

        def on_any_card(card: WorkerCard) -> None:
            if self._takes(card):
                on_card(card)

        return await self._discovery.watch(on_any_card, on_gone, on_store)

    async def close(self) -> None:
        """Does nothing: the owner of the discovery closes it."""
