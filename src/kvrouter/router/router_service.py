"""The router service of one process: the routers of all its models, fed by discovery and events."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.core.constraints import RouterMode
from kvrouter.core.cordon_rules import CordonRules
from kvrouter.core.errors import ConfigError, ModelNotReady, UnknownModel
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import Epoch, ModelName, WorkerId, WorkerRank
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, LoadReport, ModelInput, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import FleetChange
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.engine_tokenizer import EngineTokenizer
from kvrouter.router.fleet_cordons import Cordons
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.learned import Learned
from kvrouter.router.liveness import Liveness
from kvrouter.router.model_router import DecisionLog, ModelRouter
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.running_requests import Requests
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.background import DueTimes, LoopPauses
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.records.port import CordonStore, Discovery, Gone
from kvrouter.transports.requests.port import RequestTransport

MODELS_MAX = 1024
"""The most models that one router knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """The parts of a router; the composition root chooses the adapters."""

    config: KvRouterConfig
    request_transport: RequestTransport
    discovery: Discovery
    cordons: CordonStore
    subscriber: EventSubscriber
    make_model: Callable[[ModelName, int], ModelRouter]
    """(model, block size) → its model router."""

    decisions: DecisionLog
    instrumentation: ServiceInstrumentation
    sync: ReplicaSync | None = None


class RefusedCard(NamedTuple):
    """A worker card that was refused. ``param`` is the field at fault, None where no single field is."""

    card: WorkerCard
    param: str | None
    why: str


EXPIRE_EVERY_S = 1.0
"""How often predicted blocks whose time is over are removed, also while no request comes."""


class RouterService:
    """Follows the workers of every model, and takes ``requests`` for them; runs on one event loop."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self.requests = Requests(parts.config, parts.request_transport, parts.instrumentation, self.model)
        self.decisions = parts.decisions
        self.sync = parts.sync
        """Replica sync with the other routers; None where it is off."""
        self._models: dict[ModelName, ModelRouter] = {}
        self._place: Mapping[str, str] | None = None
        self._links: LinkTable | None = None
        self.learned = Learned(self.models)
        self._model_of: dict[WorkerId, ModelName] = {}
        self._refused: dict[WorkerId, RefusedCard] = {}
        self._stops: list[Callable[[], None]] = []
        self.store_lost: str | None = None
        """Why discovery is unreachable, so that the fleet stays frozen; None while it is reachable."""
        self._had_enough = False
        """Whether the minimum number of workers was ever registered at one time."""
        config = parts.config
        self._pauses = LoopPauses(self._paused)
        self._expiry: DueTimes[ModelRouter] = DueTimes(self._expire)
        self.cordons = Cordons(
            parts.cordons,
            models=self.models,
            apply=self._apply_cordons,
            instrumentation=parts.instrumentation,
        )
        self.engine_tokenizer = EngineTokenizer(parts.request_transport, parts.instrumentation)
        self.liveness = Liveness(
            parts.request_transport,
            parts.subscriber,
            follows_events=config.kv_events and config.router_mode is RouterMode.KV,
            on_alive=self._on_alive,
            on_lapsed_and_dead=self._on_lapsed_and_dead,
        )

    # Life

    async def start(self) -> None:
        """Follow the cordons and then the fleet, so that no request sees a worker without its cordons."""
        await self.cordons.start()
        self._stops.append(self.cordons.stop)
        unsubscribe = self._parts.subscriber.subscribe(self._on_batch, self._on_load)
        try:
            unwatch = await self._parts.discovery.watch(self._on_card, self._on_gone, self._on_store)
        except BaseException:
            unsubscribe()
            raise
        self._stops += (unsubscribe, unwatch, self._pauses.stop)

    def stop(self) -> None:
        """Stop following the fleet."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        self.liveness.close()
        for model in self._models.values():
            self._expiry.drop(model)
            model.cache.close()

    def refused(self) -> tuple[RefusedCard, ...]:
        """The registered workers whose cards were refused, in the order of worker ids."""
        return tuple(self._refused[worker_id] for worker_id in sorted(self._refused))

    def _paused(self, seconds: float) -> None:
        for model in self._models.values():
            model.placer.transfers.paused(seconds)

    def _expire(self, model: ModelRouter, now_s: float, _late_s: float) -> float | None:
        if self._models.get(model.fleet.model) is not model:
            return None
        model.cache.expire(model.clock())
        return now_s + EXPIRE_EVERY_S

    def moved(self, place: Mapping[str, str]) -> None:
        """Set the frontend's topology domains."""
        self._place = place
        for model in self._models.values():
            model.moved(place)

    def links_changed(self, links: LinkTable) -> None:
        """Replace the link table, where links are weighed."""
        self._links = links
        for model in self._models.values():
            model.links_changed(links)

    def _apply_cordons(self, rules: CordonRules) -> None:
        """Apply changed cordons; waiting requests may be placed again."""
        for model in self._models.values():
            turned = model.fleet.set_cordons(rules)
            for card in turned:
                self._parts.instrumentation.worker_cordoned(card, model.fleet.cordons_on(card.worker_id))
            if turned:
                model.placer.fleet_changed(now_s=model.clock())

    # The models

    def models(self) -> Iterator[ModelRouter]:
        """Every model that a worker has ever registered."""
        return iter(self._models.values())

    def find(self, name: ModelName) -> ModelRouter | None:
        """Return the model's router; None when no worker has ever registered the model."""
        return self._models.get(name)

    def model(self, name: ModelName) -> ModelRouter:
        """Return the model's router.

        Raises :class:`UnknownModel`, or :class:`ModelNotReady` while its workers may not have registered yet.
        """
        model = self.find(name)
        if model is not None:
            return model
        why = self.why_fleet_unknown
        if why is not None:
            raise ModelNotReady(
                f"model: whether {name!r} is served here is not known yet: {why}", param="model"
            )
        known = ", ".join(sorted(self._models))
        raise UnknownModel(f"model: {name!r} is not served here; known: {known}", param="model")

    @property
    def why_fleet_unknown(self) -> str | None:
        """Why this router does not know all models yet; None when it does."""
        if self.store_lost is not None:
            return "discovery cannot be reached"
        if not self._models:
            return "no worker has registered yet"
        return self.why_too_few

    @property
    def why_too_few(self) -> str | None:
        """How many of the workers required at the start have registered; None once all had."""
        least = self._parts.config.router_min_initial_workers
        if self._had_enough or least == 0:
            return None
        return f"{len(self._model_of)} of {least} workers have registered"

    # The fleet

    def _on_card(self, card: WorkerCard) -> None:
        instrumentation = self._parts.instrumentation
        self._refused.pop(card.worker_id, None)
        previous = self._model_of.get(card.worker_id)
        if card.model_input is not ModelInput.Tokens and self._parts.config.router_mode is RouterMode.KV:
            why = "KV routing needs workers that take tokens (ModelInput.Tokens)"
            self._refuse(RefusedCard(card, "model_input", why))
            if previous is not None:
                self._follow_majority(previous)
            return
        if previous is not None and previous != card.model:
            self._leave(self._models[previous], card.worker_id)
            self._follow_majority(previous)
        try:
            model = self._model_for(card)
            known = model.fleet.card(card.worker_id)
            change = model.fleet.join(card)
        except ConfigError as error:
            self._refuse(RefusedCard(card, error.param, error.message))
            if error.param == "block_size":
                self._follow_majority(card.model)
            return
        replaced = self._models.get(card.model)
        if replaced is not None and replaced is not model:
            replaced.cache.close()
        if replaced is not model:
            self._expiry.put(model, time.monotonic() + EXPIRE_EVERY_S)
        self._models[card.model] = model
        if card.role is Role.PREFILL:  # transfers may be timed from now on
            self._pauses.start()
        self._model_of[card.worker_id] = card.model
        self._had_enough |= len(self._model_of) >= self._parts.config.router_min_initial_workers
        for warning in change.warnings:
            instrumentation.worker_warned(card, warning)
        follow_warning = self.liveness.follow(card)
        if follow_warning is not None:
            instrumentation.worker_warned(card, follow_warning)
        self._apply(model, card, change)
        if known is not None and known.engine_start not in ("", card.engine_start):
            model.placer.speeds.forget(model.fleet.slots_of(card.worker_id))
        self.learned.joined(model, card)
        if known is None or known.incarnation != card.incarnation:
            instrumentation.worker_joined(card)
        else:
            instrumentation.worker_changed(card)
        cordons = model.fleet.cordons_on(card.worker_id)
        if cordons:
            instrumentation.worker_cordoned(card, cordons)
        model.placer.fleet_changed(now_s=model.clock())

    def _model_for(self, card: WorkerCard) -> ModelRouter:
        """The card's model; a new one where the model is unknown or all its workers left with another block
        size.

        A model without workers stays known, so that its requests are refused with 503 and not 404. It may
        come back with another block size, and keeps the thresholds that were set. Raises ConfigError when
        there are too many models.
        """
        model = self._models.get(card.model)
        if model is not None and (len(model.fleet) or card.block_size in (None, model.fleet.block_size)):
            return model
        if model is None and len(self._models) >= MODELS_MAX:
            self._forget_a_model()
        made = self._parts.make_model(card.model, card.block_size or BLOCK_SIZE_UNKNOWN)
        made.fleet.set_cordons(self.cordons.rules)
        if self._place is not None:
            made.moved(self._place)
        if self._links is not None:
            made.links_changed(self._links)
        if model is not None:
            settings = model.placer.settings
            made.placer.set_busy_thresholds(
                decode_blocks=settings.active_decode_blocks_threshold,
                prefill_tokens=settings.active_prefill_tokens_threshold,
                now_s=made.clock(),
            )
        return made

    def _follow_majority(self, name: ModelName) -> None:
        """Where more of the model's workers have another block size than its fleet, replace the fleet by
        them, so that no single card decides, not even the first.

        A worker kept after its lease ran out is removed for good: discovery would not report its end. Running
        answers of removed workers go on; a request that waits or needs another worker is refused with 503,
        because its prompt is hashed in blocks of the old size.
        """
        others = [
            refused.card
            for refused in self._refused.values()
            if refused.param == "block_size" and refused.card.model == name
        ]
        if not others:
            return
        fleet = self._models[name].fleet
        ((block_size, n_workers),) = Counter(card.block_size for card in others).most_common(1)
        if n_workers <= sum(card.block_size is not None for card in fleet):
            return
        present = [card for card in fleet if not self.liveness.has_lapsed(card.worker_id)]
        for card in list(fleet):
            self._leave(self._models[name], card.worker_id)
        for card in others:
            if card.block_size == block_size:
                self._on_card(card)
        for card in present:
            self._on_card(card)

    def _forget_a_model(self) -> None:
        """Remove one model: of those without workers the one known for longest; one whose busy thresholds
        were set only where there is no other.
        """
        empty = [
            model for model in self._models.values() if not len(model.fleet) and not model.placer.waiting
        ]
        if not empty:
            raise ConfigError(f"model: {MODELS_MAX} models have workers here already", param="model")
        forgotten = min(empty, key=lambda model: _has_set_thresholds(model, self._parts.config))
        forgotten.cache.close()
        del self._models[forgotten.fleet.model]

    def _refuse(self, refused: RefusedCard) -> None:
        """Refuse a card, and remove the worker's former incarnation."""
        card = refused.card
        self._refused[card.worker_id] = refused
        self._parts.instrumentation.worker_refused(card, refused.why)
        name = self._model_of.get(card.worker_id)
        old = None if name is None else self._models[name].fleet.card(card.worker_id)
        if name is not None and (old is None or old.incarnation != card.incarnation):
            self._leave(self._models[name], card.worker_id)

    def _apply(self, model: ModelRouter, card: WorkerCard, change: FleetChange) -> None:
        for slot in change.freed:
            model.freed(slot)
        if not card.publishes_kv_events:
            return
        for slot in change.joined:
            rank = model.fleet.rank_at(slot)
            if rank is not None:
                model.cache.joined(rank, slot, card.incarnation)
        for rank in card.ranks():
            at = model.fleet.slot_of(rank)
            if at is not None:
                model.capacity_changed(at)

    def _on_gone(self, worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
        refused = self._refused.get(worker_id)
        if refused is not None and refused.card.incarnation == incarnation:
            del self._refused[worker_id]
        name = self._model_of.get(worker_id)
        if name is None:
            return
        model = self._models[name]
        card = model.fleet.card(worker_id)
        if card is None or card.incarnation != incarnation:
            return
        if why is Gone.EXPIRED and self.liveness.lapsed(worker_id):
            self._parts.instrumentation.worker_lapsed(card)
            return
        self._leave(model, worker_id)
        self._follow_majority(name)

    def _on_alive(self, card: WorkerCard, is_alive: bool) -> None:
        """Note that a worker stopped answering, and gets no new requests, or that it answers again."""
        model = self._model_with(card)
        if model is not None and model.fleet.set_alive(card.worker_id, is_alive):
            is_cordoned = bool(model.fleet.cordons_on(card.worker_id))
            self._parts.instrumentation.worker_alive(card, is_alive=is_alive, is_cordoned=is_cordoned)
            model.placer.fleet_changed(now_s=model.clock())

    def _on_lapsed_and_dead(self, card: WorkerCard) -> None:
        model = self._model_with(card)
        if model is not None:
            self._leave(model, card.worker_id)
            self._follow_majority(card.model)

    def _on_store(self, is_reachable: bool, why: str) -> None:
        """Note that discovery became unreachable or reachable. Until it is reachable the fleet is frozen."""
        self.store_lost = None if is_reachable else why
        self._parts.instrumentation.discovery(is_reachable=is_reachable, why=why)

    def _model_with(self, card: WorkerCard) -> ModelRouter | None:
        """The model whose fleet has this incarnation of the worker."""
        name = self._model_of.get(card.worker_id)
        model = None if name is None else self._models[name]
        known = None if model is None else model.fleet.card(card.worker_id)
        return model if known is not None and known.incarnation == card.incarnation else None

    def _leave(self, model: ModelRouter, worker_id: WorkerId) -> None:
        self._model_of.pop(worker_id, None)
        self.liveness.drop(worker_id)
        card = model.fleet.card(worker_id)
        if card is None:
            return
        for slot in model.fleet.leave(worker_id, card.incarnation):
            model.freed(slot)
        self.engine_tokenizer.gone(card)
        self._parts.instrumentation.worker_gone(card)
        model.instrumentation.placement.worker_gone(worker_id)
        model.placer.fleet_changed(now_s=model.clock())

    def _on_batch(self, batch: KvBatch) -> None:
        model = self._model_of_rank(batch.rank)
        if model is not None:
            model.cache.on_batch(batch)

    def _on_load(self, report: LoadReport) -> None:
        model = self._model_of_rank(report.rank)
        if model is not None:
            model.reported(report)

    def _model_of_rank(self, rank: WorkerRank) -> ModelRouter | None:
        name = self._model_of.get(rank.worker_id)
        return None if name is None else self._models[name]


def _has_set_thresholds(model: ModelRouter, config: KvRouterConfig) -> bool:
    settings = model.placer.settings
    return (
        settings.active_decode_blocks_threshold != config.active_decode_blocks_threshold
        or settings.active_prefill_tokens_threshold != config.active_prefill_tokens_threshold
    )
