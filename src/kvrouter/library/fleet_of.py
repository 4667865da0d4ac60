"""What one endpoint's router sees of discovery, and which of its models is meant."""

import logging
from collections.abc import Callable

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import InvalidRequest, NoEligibleWorker
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.library.runtime import Endpoint
from kvrouter.planes.discovery.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Event, log_event

_log = logging.getLogger(__name__)


class OfEndpoint:
    """Discovery narrowed to one endpoint's workers; one with another block size is refused, and logged."""

    def __init__(self, endpoint: Endpoint, block_size: int) -> None:
        self._endpoint = endpoint
        self._block_size = block_size

    async def publish(self, card: WorkerCard) -> None:
        """Pass on."""
        await self._endpoint.runtime.discovery.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Pass on."""
        await self._endpoint.runtime.discovery.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver only the cards that belong here."""

        def on_any_card(card: WorkerCard) -> None:
            if self._endpoint.serves(card) and self._fits(card):
                on_card(card)

        return await self._endpoint.runtime.discovery.watch(on_any_card, on_gone, on_store)

    async def close(self) -> None:
        """The runtime's discovery is closed by whoever made it."""

    def _fits(self, card: WorkerCard) -> bool:
        if card.block_size == self._block_size:
            return True
        why = f"block_size: must be {self._block_size}, as this router's, not {card.block_size}"
        log_event(_log, Event.WORKER_REFUSED, worker=str(card.worker_id), model=card.model, reason=why)
        return False


class WithPrefills(OfEndpoint):
    """One endpoint's workers, and the prefill workers of its namespace that they make pairs with.

    Those are somebody's to pair with: they are delivered once a worker of the endpoint can take what they
    prefill. Until then ``on_alone`` is told that the endpoint's own workers prefill alone, model by model;
    and that they do not, from when the first of them can decode.
    """

    def __init__(
        self, endpoint: Endpoint, block_size: int, on_alone: Callable[[ModelName, bool], None]
    ) -> None:
        super().__init__(endpoint, block_size)
        self._on_alone = on_alone

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver only the cards that belong here."""
        others: dict[WorkerId, WorkerCard] = {}
        decoding: set[ModelName] = set()

        def on_own(card: WorkerCard) -> None:
            on_card(card)
            if card.model in decoding:
                return
            self._on_alone(card.model, card.role is Role.PREFILL)
            if card.role is not Role.PREFILL:
                decoding.add(card.model)
                for other in [other for other in others.values() if other.model == card.model]:
                    del others[other.worker_id]
                    on_card(other)

        def on_any_card(card: WorkerCard) -> None:
            others.pop(card.worker_id, None)
            if card.namespace != self._endpoint.namespace or not (
                card.role is Role.PREFILL or self._endpoint.serves(card)
            ):
                return
            if not self._fits(card):
                return
            if self._endpoint.serves(card):
                on_own(card)
            elif card.model in decoding:
                on_card(card)
            else:
                others[card.worker_id] = card

        def on_any_gone(worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
            other = others.get(worker_id)
            if other is not None and other.incarnation == incarnation:
                del others[worker_id]
            on_gone(worker_id, incarnation, why)

        return await self._endpoint.runtime.discovery.watch(on_any_card, on_any_gone, on_store)


def model_of(service: RouterService, name: str | None) -> ModelRouter:
    """Return the model that is meant: the only one, unless it is named."""
    if name is not None:
        return service.model(ModelName(name))
    rooms = list(service.models())
    if not rooms:
        raise NoEligibleWorker("no worker serves this endpoint", refusals={})
    if len(rooms) > 1:
        names = ", ".join(sorted(room.fleet.model for room in rooms))
        raise InvalidRequest(f"model: one of {names} must be named", param="model")
    return rooms[0]


def context_length_of(room: ModelRouter, pin: Pin | None) -> int | None:
    """What a request may ask for, prompt and answer, in tokens: of the worker it is pinned to, else the
    longest of those who may answer. Routing keeps it from workers whose context is shorter. None when nobody
    is here.
    """
    card = None if pin is None else room.fleet.card(pin.worker_id)
    return room.fleet.context_length_tokens if card is None else card.context_length
