"""The router's metrics and log events: one method for each thing that happens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, Unpack

from msgspec import structs

from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import KvrouterError, Reason, RoutingRefused, SloUnreachable
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, KvLoss, Leg, Usage
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.feed.states import FeedCount, FeedState
from kvrouter.kernel.fleet.circuit import Fault
from kvrouter.kernel.index import Applied
from kvrouter.kernel.journey import KvLost, LegLost
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.routing.interface import Pick
from kvrouter.recording.schema import FleetChange
from kvrouter.router.engine_instrumentation import EngineInstrumentation
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.telemetry import Event, Fields, Telemetry, log_event
from kvrouter.telemetry.logs import LogThrottle

logger = logging.getLogger("kvrouter.router")

_PREFILL = Leg.PREFILL
"""A constant, because access to an enumeration's members is slow before Python 3.12."""


_OUTCOMES = (
    "stored",
    "repeated",
    "replaced",
    "removed",
    "unknown_removed",
    "orphaned",
    "cleared",
    "over_limit",
)
"""The outcomes of a block of an event; see ``kernel.index.Applied``."""


class PlacementInstrumentation(PlacementEvents):
    """Metrics and log events of a model's circuit breakers and of its ranks' and links' measured speeds."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self._telemetry = telemetry
        self._model = model

    def failed(self, worker_id: WorkerId, fault: Fault) -> None:
        """A leg failed, and its worker was at fault."""
        self._telemetry.worker_failures.inc(self._model, str(worker_id), fault.value)

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row, and its circuit opened for ``for_s`` seconds."""
        worker = str(worker_id)
        self._telemetry.circuits_opened.inc(self._model, worker, fault.value)
        log_event(
            logger,
            Event.CIRCUIT_OPENED,
            model=self._model,
            worker=worker,
            reason=fault.value,
            duration_s=for_s,
        )

    def closed(self, worker_id: WorkerId) -> None:
        """A worker answered again, and its circuit closed."""
        log_event(logger, Event.CIRCUIT_CLOSED, model=self._model, worker=str(worker_id))

    def worker_gone(self, worker_id: WorkerId) -> None:
        """Remove a departed worker's counters, so that the metrics page does not grow for ever."""
        telemetry, labels = self._telemetry, (self._model, str(worker_id))
        for fault in Fault:
            telemetry.circuits_opened.forget(*labels, fault.value)
            telemetry.worker_failures.forget(*labels, fault.value)
        for leg in Leg:
            telemetry.worker_requests.forget(*labels, leg.value)
        for tokens in (
            telemetry.worker_prompt_tokens,
            telemetry.worker_cached_tokens,
            telemetry.worker_completion_tokens,
        ):
            tokens.forget(*labels)

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A pair lost KV, and its circuit opened for ``for_s`` seconds."""
        log_event(
            logger,
            Event.CIRCUIT_OPENED,
            model=self._model,
            prefill_worker=str(prefill),
            decode_worker=str(decode),
            reason=fault.value,
            duration_s=for_s,
        )

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """The pair's KV arrived; its circuit breaker closed."""
        log_event(
            logger,
            Event.CIRCUIT_CLOSED,
            model=self._model,
            prefill_worker=str(prefill),
            decode_worker=str(decode),
        )

    def first_token_observed(self, rank: WorkerRank, *, predicted_s: float, seen_s: float) -> None:
        """A first token arrived; its predicted and measured TTFT, in seconds."""
        labels = self._model, str(rank.worker_id), str(rank.dp_rank)
        self._telemetry.ttft_predicted.inc(*labels, by=predicted_s)
        self._telemetry.ttft_seen.inc(*labels, by=seen_s)
        self._telemetry.ttft_error.observe(abs(seen_s - predicted_s), self._model)

    def rank_speed_changed(self, rank: WorkerRank, *, is_slow: bool, slowness: float) -> None:
        """A rank became slow, or is no longer slow."""
        log_event(
            logger,
            Event.RANK_SLOW if is_slow else Event.RANK_WELL,
            model=self._model,
            worker=str(rank.worker_id),
            dp_rank=rank.dp_rank,
            slowness=round(slowness, 2),
        )

    def link_speed_changed(self, name: str, *, is_slow: bool, slowness: float) -> None:
        """A link, or a class of links, became slow, or is no longer slow."""
        log_event(
            logger,
            Event.LINK_SLOW if is_slow else Event.LINK_WELL,
            model=self._model,
            link=name,
            slowness=round(slowness, 2),
        )

    def rank_gone(self, rank: WorkerRank) -> None:
        """Remove a departed rank's counters."""
        labels = self._model, str(rank.worker_id), str(rank.dp_rank)
        self._telemetry.ttft_predicted.forget(*labels)
        self._telemetry.ttft_seen.forget(*labels)


class ModelInstrumentation:
    """Metrics and log events of one model; ``engines`` are those of its engines' reports."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self.engines = EngineInstrumentation(telemetry, model)
        self.placement = PlacementInstrumentation(telemetry, model)
        self._telemetry = telemetry
        self._model = model

    # The feed

    def feed_counted(self, name: FeedCount, n: int) -> None:
        """A feed counted ``n`` events of a kind."""
        self._telemetry.feed_events.inc(self._model, name.value, by=n)

    def events_applied(self, applied: Applied) -> None:
        """The index applied events."""
        counts = self._telemetry.feed_events
        for outcome in _OUTCOMES:
            count = getattr(applied, outcome)
            if count:
                counts.inc(self._model, f"blocks_{outcome}", by=count)

    def feed_changed(self, rank: WorkerRank, state: FeedState) -> None:
        """A feed changed its state."""
        self._log_rank(Event.FEED_STATE, rank, state=state.name.lower())

    def kv_events_missing(self, rank: WorkerRank, silent_s: float) -> None:
        """A rank that should publish KV events sent no message, not even a heartbeat."""
        self._log_rank(Event.KV_EVENTS_MISSING, rank, duration_s=silent_s)

    def recovery_failed(self, rank: WorkerRank, why: str) -> None:
        """A recovery request failed; the feed sends it again."""
        self._log_rank(Event.RECOVERY_FAILED, rank, reason=why)

    def _log_rank(self, event: Event, rank: WorkerRank, **fields: Unpack[Fields]) -> None:
        worker = str(rank.worker_id)
        labelled: Fields = {"model": self._model, "worker": worker, "dp_rank": rank.dp_rank, **fields}
        log_event(logger, event, **labelled)

    # Decisions

    def placed(self, placement: Placement) -> None:
        """A request was placed."""
        telemetry, decision = self._telemetry, placement.decision
        telemetry.decision_duration.observe(placement.decision_s, decision.mode)
        telemetry.decisions.inc(self._model, decision.mode, _shape_of(placement))
        for pick in (decision.decode, decision.prefill):
            if pick is not None:
                telemetry.worker_requests.inc(self._model, str(pick.rank.worker_id), pick.leg)
        if placement.waited_s is not None:
            telemetry.queue_wait.observe(placement.waited_s, self._model)
        self._log_decision(placement)

    def picked_again(self, placement: Placement) -> None:
        """Another decode worker was picked after prefill."""
        decode = placement.decision.decode
        self._telemetry.worker_requests.inc(self._model, str(decode.rank.worker_id), decode.leg.value)
        self._log_decision(placement)

    def refused(
        self,
        error: RoutingRefused,
        request: GenerateRequest,
        *,
        timed_out: bool = False,
        no_place: bool = False,
    ) -> None:
        """A request was refused, for a reason per worker rank: at once, after its wait timed out, or because
        the waiting line had no place.
        """
        if isinstance(error, SloUnreachable):
            is_critical = request.service_level.is_critical
            self._telemetry.slo_refusals.inc(self._model, "critical" if is_critical else "other")
        role = error.role or "decode"
        for reason, count in error.refusals.items():
            self._telemetry.refusals.inc(reason.value, role, by=count)
        if timed_out or no_place:
            if Reason.BUSY in error.refusals:
                self._telemetry.queue_refusals.inc(self._model, "timeout" if timed_out else "full")
            else:
                self._telemetry.domain_waits.inc("refused")
        log_event(
            logger,
            Event.REFUSAL,
            **_request_fields(request.request_id, self._model, request.trace.trace_id),
            role=role,
            domain=error.domain,
            code=error.code,
            refusals=",".join(f"{reason}={count}" for reason, count in error.refusals.items()),
            reason=error.message,
        )

    def joined_domain(self, placement: Placement, *, waited_s: float) -> None:
        """A request that waited for a decode worker in its topology domain was placed."""
        self._telemetry.domain_waits.inc("joined")
        constraint = placement.decision.constraint
        log_event(
            logger,
            Event.DOMAIN_WAIT,
            **_request_fields(placement.decision.request_id, self._model, placement.trace_id),
            domain=None if constraint is None else constraint.domain,
            value=None if constraint is None else constraint.value,
            waited_s=waited_s,
        )

    def internal_error_in_recovery(self, error: BaseException | None) -> None:
        """An internal error ended a recovery request."""
        log_event(logger, Event.INTERNAL_ERROR, exc_info=error, model=self._model)

    def malformed_events(self, rank: WorkerRank, why: str) -> None:
        """A rank's events are malformed; its snapshot is requested."""
        self._log_rank(Event.EVENTS_MISTAKEN, rank, reason=why)

    def kv_events_over_limit(self, rank: WorkerRank, detail: str) -> None:
        """A rank reported more blocks than its worker can hold; its blocks are dropped."""
        self._log_rank(Event.KV_EVENTS_OVER_LIMIT, rank, detail=detail)

    def cached_tokens(self, worker_id: WorkerId | None, *, predicted: int, actual: int) -> None:
        """An engine reported its cached prompt tokens; ``worker_id`` is None for a departed worker."""
        self._telemetry.overlap_tokens.inc(self._model, by=predicted)
        self._telemetry.cached_tokens.inc(self._model, by=actual)
        if worker_id is not None:
            self._telemetry.worker_cached_tokens.inc(self._model, str(worker_id), by=actual)

    def prompt_prefilled(self, worker_id: WorkerId, tokens: int) -> None:
        """A worker prefilled a prompt of this many tokens, cached tokens included."""
        self._telemetry.worker_prompt_tokens.inc(self._model, str(worker_id), by=tokens)

    def tokens_answered(self, worker_id: WorkerId, tokens: int) -> None:
        """A worker generated this many tokens of an answer."""
        self._telemetry.worker_completion_tokens.inc(self._model, str(worker_id), by=tokens)

    def kv_pulled(self, outcome: str, tokens: int) -> None:
        """A prefill worker fetched the KV of these tokens from its decode worker, or was to."""
        self._telemetry.kv_pulled_tokens.inc(self._model, outcome, by=tokens)

    def handed_over(self, placement: Placement) -> None:
        """Count a pair's KV handoff by the domains of both ends, when the first token arrives."""
        decision = placement.decision
        if decision.prefill is None:
            return
        domain = None if decision.constraint is None else decision.constraint.domain
        ends = _ends_of(placement)
        self._telemetry.handoffs.inc(*ends)
        if decision.fallback_used and domain is not None:
            self._telemetry.fallbacks.inc(domain)
            log_event(
                logger,
                Event.FALLBACK,
                **_request_fields(decision.request_id, self._model, placement.trace_id),
                domain=domain,
                prefill_domain=ends[0],
                decode_domain=ends[1],
            )

    def _log_decision(self, placement: Placement) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        decision = placement.decision
        fields: Fields = {"attempt": decision.attempt, "isl_tokens": placement.prompt.isl_tokens}
        add_decision(fields, placement)
        request_fields = _request_fields(decision.request_id, self._model, placement.trace_id)
        labelled: Fields = {**request_fields, **fields}
        log_event(logger, Event.DECISION, **labelled)


def add_decision(fields: Fields, placement: Placement) -> None:
    """Add the log fields of a decision, the last one where decode was picked again."""
    decision, again_s = placement.decision, placement.again_s
    constraint, decode, prefill = decision.constraint, decision.decode, decision.prefill
    fields["again"] = again_s is not None
    fields["mode"] = decision.mode
    fields["shape"] = _shape_of(placement)
    fields["prefill_worker"] = "-" if prefill is None else str(prefill.rank)
    fields["prefill_overlap_blocks"] = 0 if prefill is None else prefill.overlap_blocks
    fields["pulled_blocks"] = 0 if prefill is None else prefill.pulled_blocks
    fields["prefill_cost"] = 0.0 if prefill is None else prefill.cost
    fields["prefill_candidates"] = 0 if prefill is None else prefill.candidates
    fields["decode_worker"] = str(decode.rank)
    fields["decode_overlap_blocks"] = decode.overlap_blocks
    fields["decode_cost"] = decode.cost
    fields["decode_candidates"] = decode.candidates
    fields["enforcement"] = None if constraint is None else type(constraint.policy).__name__.lower()
    fields["domain"] = None if constraint is None else constraint.domain
    fields["value"] = None if constraint is None else constraint.value
    fields["fallback_used"] = decision.fallback_used
    fields["decision_us"] = 1e6 * (placement.decision_s if again_s is None else again_s)
    fields["waited_s"] = placement.waited_s or 0.0


@dataclass(slots=True)
class Times:
    """A request's timestamps on the monotonic clock, in seconds; None before the event."""

    begun_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None


class ServiceInstrumentation:
    """Writes metrics and log events of the fleet and of all models' requests; ``traffic``, if given, records
    traffic.
    """

    def __init__(self, telemetry: Telemetry, traffic: TrafficRecorder | None = None) -> None:
        self.traffic = traffic
        self._telemetry = telemetry
        self._throttle = LogThrottle()
        telemetry.discovery_up.set(1.0)

    def of_model(self, model: str) -> ModelInstrumentation:
        """Return the instrumentation of one model."""
        return ModelInstrumentation(self._telemetry, model)

    # Workers

    def worker_joined(self, card: WorkerCard) -> None:
        """A worker joined, or came back as a new incarnation."""
        if self.traffic is not None:
            self.traffic.worker_changed(FleetChange.JOINED, card)
        self._log_worker(Event.WORKER_JOINED, card)

    def worker_changed(self, card: WorkerCard) -> None:
        """A worker published a changed card."""
        if self.traffic is not None:
            self.traffic.worker_changed(FleetChange.CHANGED, card)
        self._log_worker(Event.WORKER_DRAINING if card.draining else Event.WORKER_CHANGED, card)

    def worker_gone(self, card: WorkerCard) -> None:
        """A worker left."""
        if self.traffic is not None:
            self.traffic.worker_changed(FleetChange.LEFT, card)
        self._log_worker(Event.WORKER_LEFT, card)

    def worker_alive(self, card: WorkerCard, *, is_alive: bool, is_cordoned: bool) -> None:
        """A worker stopped answering, or answers again."""
        if self.traffic is not None:
            recorded = structs.replace(card, draining=card.draining or is_cordoned)
            self.traffic.worker_changed(FleetChange.ANSWERS if is_alive else FleetChange.SILENT, recorded)
        self._log_worker(Event.WORKER_ANSWERS if is_alive else Event.WORKER_SILENT, card)

    def worker_cordoned(self, card: WorkerCard, cordons: Sequence[Cordon]) -> None:
        """A worker's cordons changed, or it joined with some. A recording calls a cordoned worker draining: a
        replay treats both alike.
        """
        if self.traffic is not None:
            recorded = structs.replace(card, draining=card.draining or bool(cordons))
            self.traffic.worker_changed(FleetChange.CHANGED, recorded)
        log_event(
            logger,
            Event.WORKER_CORDONED if cordons else Event.WORKER_UNCORDONED,
            worker=str(card.worker_id),
            model=card.model,
            role=card.role.value,
            cordon=", ".join(cordon.place for cordon in cordons) or None,
        )

    def cordoned(self, cordon: Cordon, *, workers: int) -> None:
        """A cordon was added."""
        self._log_cordon(Event.CORDONED, cordon, workers)

    def uncordoned(self, cordon: Cordon, *, workers: int) -> None:
        """A cordon was removed."""
        self._log_cordon(Event.UNCORDONED, cordon, workers)

    def cordons_lost(self, why: str) -> None:
        """The cordon store cannot be read."""
        log_event(logger, Event.CORDONS_LOST, reason=why)

    def cordons_back(self) -> None:
        """The cordon store can be read again."""
        log_event(logger, Event.CORDONS_BACK)

    @staticmethod
    def _log_cordon(event: Event, cordon: Cordon, workers: int) -> None:
        log_event(
            logger,
            event,
            cordon=cordon.place,
            reason=cordon.reason or None,
            by=cordon.by or None,
            source=cordon.source.value,
            workers=workers,
        )

    def worker_lapsed(self, card: WorkerCard) -> None:
        """A worker's lease ran out; the worker is kept because it answers."""
        self._log_worker(Event.WORKER_LAPSED, card)

    def discovery(self, *, is_reachable: bool, why: str) -> None:
        """Discovery became unreachable, or reachable again."""
        self._telemetry.discovery_up.set(float(is_reachable))
        if is_reachable:
            log_event(logger, Event.DISCOVERY_BACK)
        else:
            log_event(logger, Event.DISCOVERY_LOST, reason=why)

    def worker_refused(self, card: WorkerCard, why: str) -> None:
        """A worker's card was refused."""
        log_event(logger, Event.WORKER_REFUSED, worker=str(card.worker_id), model=card.model, reason=why)

    def engine_tokenized(self, model: str, outcome: str) -> None:
        """An engine was asked to tokenize a prompt."""
        self._telemetry.engine_tokenized.inc(model, outcome)

    def engine_tokenize_failed(self, card: WorkerCard, why: str) -> None:
        """A worker's engine is paused for tokenization."""
        event, worker = Event.ENGINE_TOKENIZE_FAILED, str(card.worker_id)
        log_event(logger, event, model=card.model, worker=worker, reason=why)

    def worker_warned(self, card: WorkerCard, warning: str) -> None:
        """A worker's card has a questionable value."""
        log_event(logger, Event.CONFIG_WARNING, worker=str(card.worker_id), model=card.model, detail=warning)

    @staticmethod
    def _log_worker(event: Event, card: WorkerCard) -> None:
        config = card.runtime_config
        log_event(
            logger,
            event,
            worker=str(card.worker_id),
            model=card.model,
            role=card.role.value,
            domain=",".join(f"{key}={value}" for key, value in config.topology_domains.items()),
            taints=",".join(sorted(config.taints)),
            reason="its engine does not answer" if card.engine_silent else None,
            enforcement=None
            if config.kv_transfer_enforcement is None
            else config.kv_transfer_enforcement.value,
        )

    # Requests

    def request_begun(self, model: str) -> None:
        """A request began."""
        self._telemetry.requests_active.add(1, model)

    def internal_error(self, request: GenerateRequest, error: BaseException | None) -> None:
        """An internal error ended a request."""
        _log_request(Event.INTERNAL_ERROR, request, exc_info=error)

    def sent_again(self, request: GenerateRequest, lost: LegLost, *, streaming: bool) -> None:
        """A request goes to another worker, because its worker failed."""
        if streaming:
            self._telemetry.resumes.inc(request.model)
        else:
            self._telemetry.retries.inc(request.model, lost.leg.value)
        event = Event.RESUME if streaming else Event.RETRY
        _log_request(event, request, worker=str(lost.worker_id), stage=lost.leg.value, reason=lost.why)

    def answer_unread(self, request: GenerateRequest, pick: Pick, why: str) -> None:
        """An engine wrote an answer of which a part could not be parsed; the client got all of it."""
        worker = str(pick.rank.worker_id)
        if self._throttle.allows(f"unread {request.model} {worker}"):
            _log_request(Event.ANSWER_UNREAD, request, worker=worker, reason=why)

    def retry_body_dropped(self, request: GenerateRequest) -> None:
        """A client call's body was dropped, because the budget for retries is full."""
        self._telemetry.retry_bodies_dropped.inc(request.model)

    def kv_lost(self, request: GenerateRequest, lost: KvLost, loss: KvLoss) -> None:
        """A decode worker did not get the prefill worker's KV."""
        prefill, decode = str(lost.prefill_worker_id), str(lost.decode_worker_id)
        self._telemetry.kv_lost.inc(request.model, prefill, decode, loss.value)
        _log_request(
            Event.KV_LOST,
            request,
            prefill_worker=prefill,
            decode_worker=decode,
            reason=loss.value,
            detail=lost.why,
        )

    def prefill_failed(self, request: GenerateRequest, worker_id: WorkerId, why: str) -> None:
        """A prefill leg without a decode leg of this router failed while it ran."""
        _log_request(Event.REQUEST_FAILED, request, worker=str(worker_id), stage="prefill", reason=why)

    def booking_lapsed(self, model: str, placement: Placement) -> None:
        """A booking lapsed: its owner neither freed nor renewed it."""
        self._telemetry.bookings_lapsed.inc(model)
        log_event(
            logger,
            Event.BOOKING_LAPSED,
            **_request_fields(placement.decision.request_id, model, placement.trace_id),
            worker=str(placement.decision.decode.rank.worker_id),
            isl_tokens=placement.prompt.isl_tokens,
        )

    def request_ended(
        self,
        request: GenerateRequest,
        *,
        error: KvrouterError | None,
        finished: bool,
        times: Times,
        gaps_s: Sequence[float],
        usage: Usage,
        cache_known: bool,
        first_placement: Placement | None,
    ) -> None:
        """A request ended: finished, failed, or cancelled by its client. ``first_placement`` is that of the
        attempt that brought the first token; ``cache_known`` says whether the engine reported its cached
        tokens.
        """
        telemetry, model, trace_id = self._telemetry, request.model, request.trace.trace_id
        telemetry.requests_active.add(-1, model)
        telemetry.completion_tokens.inc(model, by=usage.completion_tokens)
        if times.first_token_s is not None:
            ttft_s = times.first_token_s - times.begun_s
            telemetry.prompt_tokens.inc(model, by=usage.prompt_tokens)
            telemetry.request_prompt_tokens.observe(usage.prompt_tokens, model)
            telemetry.request_completion_tokens.observe(usage.completion_tokens, model)
            telemetry.ttft.observe(ttft_s, model, trace_id=trace_id)
            route = "tokens" if request.call is None else request.call.route.generates
            if route is not None:
                telemetry.cache_reports.inc(model, route, "yes" if cache_known else "no")
            if cache_known:
                telemetry.cache_reported_prompt_tokens.inc(model, by=usage.prompt_tokens)
            cache_hit = _cache_hit(usage) if cache_known else "unknown"
            telemetry.ttft_by_cache_hit.observe(ttft_s, model, cache_hit, trace_id=trace_id)
            if first_placement is not None and first_placement.decision.prefill is not None:
                telemetry.ttft_by_domain.observe(ttft_s, *_ends_of(first_placement), trace_id=trace_id)
            telemetry.inter_token_latency.observe_many(gaps_s, model)
        if times.ended_s is not None:
            telemetry.request_duration.observe(times.ended_s - times.begun_s, model, trace_id=trace_id)
        if error is not None:
            if not isinstance(error, RoutingRefused):
                _log_request(Event.REQUEST_FAILED, request, code=error.code, reason=error.message)
        elif not finished:
            stage = "queued" if times.placed_s is None else "prefill"
            if times.first_token_s is not None:
                stage = "decode"
            telemetry.cancellations.inc(model, stage)
            _log_request(Event.CANCELLED, request, stage=stage)


def _log_request(
    event: Event,
    request: GenerateRequest,
    *,
    exc_info: BaseException | None = None,
    **fields: Unpack[Fields],
) -> None:
    common = _request_fields(request.request_id, request.model, request.trace.trace_id)
    labelled: Fields = {**common, **fields}
    log_event(logger, event, exc_info=exc_info, **labelled)


class _RequestFields(TypedDict):
    request_id: str
    model: str
    trace_id: NotRequired[str]


def _request_fields(request_id: str, model: str, trace_id: str) -> _RequestFields:
    """The fields that identify a request in a log line; no ``trace_id`` outside a trace."""
    if trace_id:
        return {"request_id": request_id, "trace_id": trace_id, "model": model}
    return {"request_id": request_id, "model": model}


def expected_tokens(placement: Placement) -> int | None:
    """Return the prompt tokens that the router expected the prefilling worker to find in its cache, or to
    fetch; None where it does not know the prompt, and where there is none. An engine always computes the last
    token, and so the block that it ends, also where all blocks are cached.
    """
    if placement.route_request.is_prompt_unknown or not placement.prompt.isl_tokens:
        return None
    found_blocks = (placement.prompt.isl_tokens - 1) // placement.block_size
    pick = placement.decision.prefilling
    return min(max(pick.overlap_blocks, pick.pulled_blocks), found_blocks) * placement.block_size


def _ends_of(placement: Placement) -> tuple[str, str]:
    """The transfer domain's values at both ends of a pair; ``none`` without a transfer domain."""
    constraint = placement.decision.constraint
    if constraint is None:
        return "none", "none"
    return (
        placement.prefill_domains.get(constraint.domain, "unknown"),
        placement.decode_domains.get(constraint.domain, "unknown"),
    )


def _cache_hit(usage: Usage) -> str:
    if not usage.cached_tokens:
        return "none"
    return "over_half" if 2 * usage.cached_tokens >= usage.prompt_tokens else "under_half"


def _shape_of(placement: Placement) -> str:
    """The metric label of a request's shape: the placement's, or ``prefill`` for a prefill leg alone."""
    return "prefill" if placement.decision.decode.leg is _PREFILL else placement.shape
