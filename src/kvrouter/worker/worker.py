"""What runs beside one engine: it serves legs, publishes events and loads, and says who it is."""

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from kvrouter.core.errors import ShuttingDown
from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import LoadReport, ModelRuntimeConfig, WorkerCard
from kvrouter.engines.port import Engine
from kvrouter.planes.discovery.port import Discovery
from kvrouter.planes.events.port import EventPublisher
from kvrouter.planes.requests.port import EngineStream, RequestServer
from kvrouter.worker.publisher import KvPublisher


class Registration(Protocol):
    """A worker's place in the request plane."""

    def leave(self, why: str) -> None:
        """Open streams break, new ones are refused."""


ServeRequests = Callable[[str, RequestServer], Registration]
ServeRecovery = Callable[[WorkerId, KvPublisher], Callable[[], None]]


class Worker:
    """One engine in the fleet: ``start``, ``begin_drain``, ``stop``; ``die`` is a death without goodbye."""

    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        *,
        discovery: Discovery,
        events: EventPublisher,
        serve_requests: ServeRequests,
        serve_recovery: ServeRecovery,
    ) -> None:
        self.engine = engine
        self.card = card
        self._discovery = discovery
        self._events = events
        self._serve_requests = serve_requests
        self._serve_recovery = serve_recovery
        self._registration: Registration | None = None
        self._end_recovery: Callable[[], None] | None = None
        self.publisher = KvPublisher(
            events,
            worker_id=card.worker_id,
            epoch=card.incarnation,
            snapshot=engine.snapshot,
            block_size=card.block_size,
        )

    async def start(self) -> None:
        """Serve first, then publish the card: whoever finds it can use it."""
        await self.engine.start(self._on_events, self._on_load)
        self._end_recovery = self._serve_recovery(self.card.worker_id, self.publisher)
        self._registration = self._serve_requests(self.card.address, self)
        await self._discovery.publish(self.card)

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Accept a leg; a draining worker refuses, and the router goes elsewhere."""
        if self.card.draining:
            raise ShuttingDown(f"worker {self.card.worker_id} is draining")
        return await self.engine.submit(request)

    async def publish_runtime_config(self, config: ModelRuntimeConfig) -> None:
        """Publish the card again with another runtime config, as when a topology label changed."""
        self.card = replace(self.card, runtime_config=config)
        await self._discovery.publish(self.card)

    async def begin_drain(self) -> None:
        """Take no new legs; running ones go on."""
        self.card = replace(self.card, draining=True)
        await self._discovery.publish(self.card)

    async def stop(self) -> None:
        """Say goodbye, then stop serving."""
        await self._discovery.withdraw(self.card.worker_id, self.card.incarnation)
        self._leave("the worker was stopped")
        await self.engine.stop()

    def die(self, why: str) -> None:
        """Vanish without a goodbye: the card stays until discovery notices."""
        self._leave(why)

    def _leave(self, why: str) -> None:
        self.publisher.close()
        if self._end_recovery is not None:
            self._end_recovery()
            self._end_recovery = None
        if self._registration is not None:
            self._registration.leave(why)
            self._registration = None

    def _on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        if self.card.publishes_kv_events:
            self.publisher.publish(dp_rank, events)

    def _on_load(self, report: LoadReport) -> None:
        self._events.publish_load(report)
