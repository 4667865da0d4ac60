"""The workers of an endpoint as a router of the library follows them, and why some of them are absent."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrouter.core.errors import InvalidRequest, ModelNotReady, NoEligibleWorker, RoutingRefused, UnknownModel
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.library.runtime import Endpoint, add_reasons
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RefusedCard, RouterService
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.records.narrowed import NarrowedDiscovery
from kvrouter.transports.records.port import CardSink, Gone, GoneSink, StoreSink

_log = logging.getLogger(__name__)


class EndpointDiscovery(NarrowedDiscovery):
    """Discovery of one endpoint's workers.

    With a ``block_size`` a worker with another one is refused: this is logged, and :attr:`refused` has it.
    """

    def __init__(self, endpoint: Endpoint, block_size: int | None) -> None:
        super().__init__(endpoint.runtime.discovery, lambda card: self._concerns(card) and self._fits(card))
        self.endpoint = endpoint
        self._block_size = block_size
        self.refused: dict[WorkerId, RefusedCard] = {}
        """The registered workers that were refused."""

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver the cards of the endpoint that fit."""

        def on_any_gone(worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
            refused = self.refused.get(worker_id)
            if refused is not None and refused.card.incarnation == incarnation:
                del self.refused[worker_id]
            on_gone(worker_id, incarnation, why)

        return await super().watch(on_card, on_any_gone, on_store)

    def _concerns(self, card: WorkerCard) -> bool:
        """Whether the worker is followed if it fits."""
        return self.endpoint.serves(card)

    def _fits(self, card: WorkerCard) -> bool:
        self.refused.pop(card.worker_id, None)
        if self._block_size is None or card.block_size == self._block_size:
            return True
        has = "unknown" if card.block_size is None else card.block_size
        why = f"block_size: must be {self._block_size}, as this router's, not {has}"
        self.refused[card.worker_id] = RefusedCard(card, "block_size", why)
        log_event(_log, Event.WORKER_REFUSED, worker=str(card.worker_id), model=card.model, reason=why)
        return False


class PairDiscovery(EndpointDiscovery):
    """Discovery of one endpoint's workers, and of the prefill workers of its namespace that they pair with.

    Prefill workers are delivered once a worker of the endpoint can decode their model. ``on_alone`` is called
    with True for a model while the endpoint's own workers of it only prefill, with False once one decodes.
    """

    def __init__(
        self, endpoint: Endpoint, block_size: int | None, on_alone: Callable[[ModelName, bool], None]
    ) -> None:
        super().__init__(endpoint, block_size)
        self._on_alone = on_alone

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver only the cards of the endpoint and of its prefill partners."""
        others: dict[WorkerId, WorkerCard] = {}
        decoding: set[ModelName] = set()

        def on_endpoint_card(card: WorkerCard) -> None:
            on_card(card)
            if card.model in decoding:
                return
            self._on_alone(card.model, card.role is Role.PREFILL)
            if card.role is not Role.PREFILL:
                decoding.add(card.model)
                for other in [other for other in others.values() if other.model == card.model]:
                    del others[other.worker_id]
                    on_card(other)

        def on_fitting_card(card: WorkerCard) -> None:
            others.pop(card.worker_id, None)
            if self.endpoint.serves(card):
                on_endpoint_card(card)
            elif card.model in decoding:
                on_card(card)
            else:
                others[card.worker_id] = card

        def on_any_gone(worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
            other = others.get(worker_id)
            if other is not None and other.incarnation == incarnation:
                del others[worker_id]
            on_gone(worker_id, incarnation, why)

        return await super().watch(on_fitting_card, on_any_gone, on_store)

    def _concerns(self, card: WorkerCard) -> bool:
        return self.endpoint.serves(card) or (
            card.role is Role.PREFILL and card.namespace == self.endpoint.namespace
        )


class EndpointWorkers:
    """The workers of an endpoint, as a router or an indexer of the library follows them."""

    def __init__(self, service: RouterService, discovery: EndpointDiscovery) -> None:
        self._service = service
        self._discovery = discovery

    def model(self, name: str | None) -> ModelRouter:
        """Return the model ``name``, or the only one for None.

        Raises NoEligibleWorker that says why workers are absent, UnknownModel, ModelNotReady, InvalidRequest.
        """
        with self.explaining():
            known = [each for each in self._service.models() if name in (None, each.fleet.model)]
            if len(known) == 1:
                return known[0]
            if known:
                names = ", ".join(sorted(each.fleet.model for each in known))
                raise InvalidRequest(f"model: one of {names} must be named", param="model")
            if name is not None and not any(each.card.model == name for each in self._refused()):
                return self._service.model(ModelName(name))  # raises why it is not known
            raise NoEligibleWorker("no worker serves this endpoint", refusals={})

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add to an error of routing which workers are absent, and why."""
        try:
            yield
        except (RoutingRefused, UnknownModel, ModelNotReady) as error:
            refused = self._refused()
            reasons = [f"worker {each.card.worker_id} was refused: {each.why}" for each in refused]
            reasons += self._discovery.endpoint.runtime.why_absent()
            add_reasons(error, reasons, param=refused[0].param if refused else None)
            raise

    def _refused(self) -> tuple[RefusedCard, ...]:
        return (*self._discovery.refused.values(), *self._service.refused())
