"""The router of one process: the routers of all its models, fed by discovery and events."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import structs

from kvrouter.config.router import KvRouterConfig
from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.constraints import RouterMode
from kvrouter.core.cordons import CordonRules
from kvrouter.core.errors import ConfigError, ModelNotReady, ShuttingDown, UnknownModel
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import Epoch, ModelName, RequestId, RouterId, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest
from kvrouter.core.sync import LinkNews
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, LoadReport, ModelInput, Role, WorkerCard
from kvrouter.fleet.fleet import FleetChange
from kvrouter.routing.request import Decision
from kvrouter.service.cordons import Cordons
from kvrouter.service.engine_tokenizer import EngineTokenizer
from kvrouter.service.generation import Generation
from kvrouter.service.instrumentation import ServiceInstrumentation
from kvrouter.service.legs import with_intake_id
from kvrouter.service.liveness import Liveness
from kvrouter.service.model_router import DecisionLog, KeptDecision, ModelRouter
from kvrouter.service.replica_sync import ReplicaSync
from kvrouter.service.stall_watch import Timeouts
from kvrouter.service.traffic import NO_ORIGIN, LegSpans, Origin, TrafficRecorder
from kvrouter.topology import LinkTable
from kvrouter.transports.background import LoopPauses
from kvrouter.transports.discovery.port import CordonStore, Discovery, Gone
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.requests.port import RequestPlane

MODELS_MAX = 1024
"""How many models one router knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What a router is made of: the composition root picks the adapters."""

    config: KvRouterConfig
    plane: RequestPlane
    discovery: Discovery
    cordons: CordonStore
    subscriber: EventSubscriber
    make_model: Callable[[ModelName, int], ModelRouter]
    """(model, block size) → its model router."""

    decisions: DecisionLog
    observed: ServiceInstrumentation
    sync: ReplicaSync | None = None


class RefusedCard(NamedTuple):
    """A card that cannot be routed to. ``param`` is the field at fault; None where it is none."""

    card: WorkerCard
    param: str | None
    why: str


RECALLED_S = 3600.0
"""What was seen of links so long ago says nothing any more: it is not kept for workers that never come."""


class RouterService:
    """Takes requests for every model; runs on one event loop."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._models: dict[ModelName, ModelRouter] = {}
        self._place: Mapping[str, str] | None = None
        self._links: LinkTable | None = None
        self._recalled: dict[ModelName, list[LinkNews]] = {}
        self._recalled_s = 0.0
        self._model_of: dict[WorkerId, ModelName] = {}
        self._refused: dict[WorkerId, RefusedCard] = {}
        self._running: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._retry_bodies = ByteBudget(parts.config.retry_bodies_max_bytes)
        self._is_draining = False
        self._stops: list[Callable[[], None]] = []
        self._store_lost: str | None = None
        self._had_enough = False
        """Whether as many workers were here at one time as are waited for at the start."""
        config = parts.config
        self._pauses = LoopPauses(self._paused)
        self.cordons = Cordons(
            parts.cordons, models=self.models, apply=self._apply_cordons, observed=parts.observed
        )
        self.engine_tokenizer = EngineTokenizer(parts.plane, parts.observed)
        self._liveness = Liveness(
            parts.plane,
            parts.subscriber,
            hears_events=config.kv_events and config.router_mode is RouterMode.KV,
            on_alive=self._on_alive,
            on_lapsed_and_dead=self._on_lapsed_and_dead,
        )
        first_token_s = config.ttft_timeout_s or config.request_timeout_s
        self._timeouts = Timeouts(
            prefill_s=first_token_s,
            first_token_s=first_token_s,
            between_tokens_s=config.stall_timeout_s,
            request_s=config.request_timeout_s,
        )

    # Life

    async def start(self) -> None:
        """Begin to follow the cordons, and then the fleet: no request is to see a worker without them."""
        await self.cordons.start()
        self._stops.append(self.cordons.stop)
        deaf = self._parts.subscriber.subscribe(self._on_batch, self._on_load)
        try:
            blind = await self._parts.discovery.watch(self._on_card, self._on_gone, self._on_store)
        except BaseException:
            deaf()
            raise
        self._stops += (deaf, blind, self._pauses.stop)

    async def drain(self, limit_s: float) -> int:
        """Take no new requests; wait for the running ones. Returns how many were cut at the limit."""
        self._is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        cut = list(self._running)
        for generation in cut:
            generation.abort(ShuttingDown("this router shut down before the answer was complete"))
        return len(cut)

    def stop(self) -> None:
        """Follow the fleet no longer."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._liveness.close()
        for model in self._models.values():
            model.cache.close()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def store_lost(self) -> str | None:
        """Why discovery cannot be reached, and the fleet is frozen as it was; None while it can."""
        return self._store_lost

    @property
    def sync(self) -> ReplicaSync | None:
        """What shares this router's bookings with others; None where nobody asked for that."""
        return self._parts.sync

    def refused(self) -> tuple[RefusedCard, ...]:
        """The workers that are announced and cannot be routed to, in the order of worker ids."""
        return tuple(self._refused[worker_id] for worker_id in sorted(self._refused))

    def has_lapsed(self, worker_id: WorkerId) -> bool:
        """Whether a worker is here only because it answers: its lease at discovery ran out."""
        return self._liveness.has_lapsed(worker_id)

    @property
    def running(self) -> int:
        """How many requests are running."""
        return len(self._running)

    def _paused(self, seconds: float) -> None:
        for model in self._models.values():
            model.placer.transfers.paused(seconds)

    def moved(self, place: Mapping[str, str]) -> None:
        """The frontend has these domains from now on."""
        self._place = place
        for model in self._models.values():
            model.moved(place)

    def links_changed(self, links: LinkTable) -> None:
        """Weigh these links from now on, where links are weighed."""
        self._links = links
        for model in self._models.values():
            model.links_changed(links)

    def _apply_cordons(self, rules: CordonRules) -> None:
        """Other workers are cordoned from now on; requests that wait may try again."""
        for model in self._models.values():
            turned = model.fleet.set_cordons(rules)
            for card in turned:
                self._parts.observed.worker_cordoned(card, model.fleet.cordons_on(card.worker_id))
            if turned:
                model.placer.fleet_changed(now_s=model.clock())

    def recall(self, news: Iterable[LinkNews], *, aged_s: float) -> None:
        """Let models learn from what was known of their links so long ago; those whose workers did not come
        yet, when they come.
        """
        self._recalled_s = time.monotonic() - aged_s
        for each in news:
            model = self._models.get(each.model)
            if model is None:
                self._recalled.setdefault(each.model, []).append(each)
            else:
                model.placer.transfers.on_news(each, now_s=model.clock(), aged_s=aged_s)

    def known_links(self, router_id: RouterId) -> Iterator[LinkNews]:
        """Yield what is known of every model's links now, also of models whose workers did not come yet: of
        those for :data:`RECALLED_S`.
        """
        for model in self._models.values():
            yield from model.placer.transfers.all_news(router_id, now_s=model.clock())
        aged_s = time.monotonic() - self._recalled_s
        for recalled in self._recalled.values():
            for news in recalled:
                seen = [structs.replace(each, age_s=each.age_s + aged_s) for each in news.seen]
                kept = tuple(each for each in seen if each.age_s <= RECALLED_S)
                if kept:
                    yield structs.replace(news, seen=kept)

    # Requests

    def models(self) -> Iterator[ModelRouter]:
        """Every model that a worker ever registered."""
        return iter(self._models.values())

    def find(self, name: ModelName) -> ModelRouter | None:
        """Return the model's router; None when no worker ever registered it."""
        return self._models.get(name)

    def model(self, name: ModelName) -> ModelRouter:
        """Return the model's router.

        Raises :class:`UnknownModel`, or :class:`ModelNotReady` while its workers may be on their way.
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
        """Why this router cannot say which models there are; None when it can."""
        if self._store_lost is not None:
            return "discovery cannot be reached"
        if not self._models:
            return "no worker has registered yet"
        return self.why_too_few

    @property
    def why_too_few(self) -> str | None:
        """How many of the workers are here that this router waits for at its start; None once all were."""
        least = self._parts.config.router_min_initial_workers
        if self._had_enough or least == 0:
            return None
        return f"{len(self._model_of)} of {least} workers have registered"

    def generate(
        self,
        request: GenerateRequest,
        *,
        received_s: float | None = None,
        origin: Origin = NO_ORIGIN,
        spans: LegSpans | None = None,
    ) -> Generation:
        """Return the request's answer, to be read; nothing is decided before the first read.

        ``received_s``: when its last byte came, on the monotonic clock; times are counted from then on.
        ``origin`` is what a recording of the traffic says of the call; ``spans`` hears of its legs.
        """
        if self._is_draining:
            raise ShuttingDown("this router is shutting down and takes no new requests")
        model = self.model(request.model)
        generation = Generation(
            with_intake_id(request),
            model,
            self._parts.plane,
            timeouts=self._timeouts_with(request),
            redispatches_max=self._parts.config.retries_max,
            observed=self._parts.observed,
            retry_bodies=self._retry_bodies,
            on_end=self._ended,
            received_s=received_s,
            origin=origin,
            spans=spans,
        )
        self._running.add(generation)
        self._idle.clear()
        self._parts.observed.request_begun(request.model)
        generation.keep_call()
        return generation

    @property
    def traffic(self) -> TrafficRecorder | None:
        """What records the traffic; None where nobody asked for that."""
        return self._parts.observed.traffic

    @property
    def retry_body_bytes(self) -> int:
        """What the bodies of client calls hold that are kept to be sent again."""
        return self._retry_bodies.bytes

    def _timeouts_with(self, request: GenerateRequest) -> Timeouts:
        """An engine that answers at once says nothing before its last token; its prefill leg has but one."""
        if request.call is None or request.call.stream:
            return self._timeouts
        return replace(self._timeouts, first_token_s=self._timeouts.request_s)

    def explain(self, request: GenerateRequest) -> Decision:
        """Decide without sending: the same path, with a row for every candidate."""
        return self.model(request.model).explain(request)

    def decisions(self, request_id: RequestId) -> list[KeptDecision] | None:
        """The kept decisions of a request, attempt by attempt."""
        return self._parts.decisions.get(request_id)

    def latest_decisions(self, limit: int) -> list[KeptDecision]:
        """The last kept decision of each of the last ``limit`` requests, the newest request first."""
        return self._parts.decisions.latest(limit)

    def _ended(self, generation: Generation) -> None:
        self._running.discard(generation)
        if not self._running:
            self._idle.set()

    # The fleet

    def _on_card(self, card: WorkerCard) -> None:
        observed = self._parts.observed
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
        self._models[card.model] = model
        if card.role is Role.PREFILL:  # from now on transfers may be timed
            self._pauses.start()
        for news in self._recalled.pop(card.model, ()):
            aged_s = time.monotonic() - self._recalled_s
            model.placer.transfers.on_news(news, now_s=model.clock(), aged_s=aged_s)
        self._model_of[card.worker_id] = card.model
        self._had_enough |= len(self._model_of) >= self._parts.config.router_min_initial_workers
        for warning in change.warnings:
            observed.worker_warned(card, warning)
        odd = self._liveness.follow(card)
        if odd is not None:
            observed.worker_warned(card, odd)
        self._apply(model, card, change)
        if known is None or known.incarnation != card.incarnation:
            observed.worker_joined(card)
        else:
            observed.worker_changed(card)
        cordons = model.fleet.cordons_on(card.worker_id)
        if cordons:
            observed.worker_cordoned(card, cordons)
        model.placer.fleet_changed(now_s=model.clock())

    def _model_for(self, card: WorkerCard) -> ModelRouter:
        """The card's model; a new one where there was none, or where all its workers left.

        A model without workers stays known: its requests are refused with 503, not 404. It may come back with
        another block size, and keeps the thresholds that were set. Raises ConfigError when there are too many
        models.
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
        """Where more of the model's workers have another block size than the one that its fleet has, take
        them instead. So no single card decides, be it the first one.

        A worker that was kept although its lease ran out goes for good: nobody would report when it is gone,
        and a card without a worker must not count. Answers on their way from the workers that go come to
        their end; a request that waits, or that needs another worker, is refused with 503: its prompt is
        hashed in blocks of the old size.
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
        present = [card for card in fleet if not self.has_lapsed(card.worker_id)]
        for card in list(fleet):
            self._leave(self._models[name], card.worker_id)
        for card in others:
            if card.block_size == block_size:
                self._on_card(card)
        for card in present:
            self._on_card(card)

    def _forget_a_model(self) -> None:
        """Remove one model: of the models whose workers all left, the one that has been known the longest is
        forgotten; one whose busy thresholds were set only where there is no other.
        """
        empty = [
            model for model in self._models.values() if not len(model.fleet) and not model.placer.waiting
        ]
        if not empty:
            raise ConfigError(f"model: {MODELS_MAX} models have workers here already", param="model")
        forgotten = min(empty, key=self._has_set_thresholds)
        forgotten.cache.close()
        del self._models[forgotten.fleet.model]

    def _has_set_thresholds(self, model: ModelRouter) -> bool:
        config, settings = self._parts.config, model.placer.settings
        return (
            settings.active_decode_blocks_threshold != config.active_decode_blocks_threshold
            or settings.active_prefill_tokens_threshold != config.active_prefill_tokens_threshold
        )

    def _refuse(self, refused: RefusedCard) -> None:
        """A card that cannot be used. What the worker was before is gone all the same."""
        card = refused.card
        self._refused[card.worker_id] = refused
        self._parts.observed.worker_refused(card, refused.why)
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
        if why is Gone.EXPIRED and self._liveness.lapsed(worker_id):
            self._parts.observed.worker_lapsed(card)
            return
        self._leave(model, worker_id)
        self._follow_majority(name)

    def _on_alive(self, card: WorkerCard, is_alive: bool) -> None:
        """A worker stopped answering, or answers again; one that does not gets no new requests."""
        model = self._model_with(card)
        if model is not None and model.fleet.set_alive(card.worker_id, is_alive):
            is_cordoned = bool(model.fleet.cordons_on(card.worker_id))
            self._parts.observed.worker_alive(card, is_alive=is_alive, is_cordoned=is_cordoned)
            model.placer.fleet_changed(now_s=model.clock())

    def _on_lapsed_and_dead(self, card: WorkerCard) -> None:
        model = self._model_with(card)
        if model is not None:
            self._leave(model, card.worker_id)
            self._follow_majority(card.model)

    def _on_store(self, is_reachable: bool, why: str) -> None:
        """Discovery was lost, or is back. Until it is back the fleet stays as it was."""
        self._store_lost = None if is_reachable else why
        self._parts.observed.discovery(is_reachable=is_reachable, why=why)

    def _model_with(self, card: WorkerCard) -> ModelRouter | None:
        """The model that holds this very incarnation of the worker."""
        name = self._model_of.get(card.worker_id)
        model = None if name is None else self._models[name]
        known = None if model is None else model.fleet.card(card.worker_id)
        return model if known is not None and known.incarnation == card.incarnation else None

    def _leave(self, model: ModelRouter, worker_id: WorkerId) -> None:
        self._model_of.pop(worker_id, None)
        self._liveness.drop(worker_id)
        card = model.fleet.card(worker_id)
        if card is None:
            return
        for slot in model.fleet.leave(worker_id, card.incarnation):
            model.freed(slot)
        self.engine_tokenizer.gone(card)
        self._parts.observed.worker_gone(card)
        model.observed.circuits.gone(worker_id)
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
