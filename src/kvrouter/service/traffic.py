"""What is recorded of traffic: requests as they end, calls that are refused, changes of the fleet."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints, adapter_taint
from kvrouter.core.errors import KvrouterError, Reason, RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.requests import GenerateRequest, KvLoss, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.journey import Shape
from kvrouter.placement.placement import Placement
from kvrouter.recording.recorder import Recorder, microseconds
from kvrouter.recording.records import (
    AttemptRecord,
    Constraints,
    FleetChange,
    LegRecord,
    RefusalRecord,
    RequestRecord,
    Status,
    Worker,
)
from kvrouter.routing.request import Decision, Pick
from kvrouter.topology import TransferConstraint, topology_domains, worker_taints


class Origin(msgspec.Struct, frozen=True, gc=False):
    """What a call says of itself: its route, and the client's ids of its session and of the session that
    began that one.
    """

    route: str | None = None
    session: str | None = None
    parent: str | None = None


NO_ORIGIN = Origin()

_NOTHING_ASKED = RoutingConstraints()
_NOTHING_OVERRIDDEN = RouterConfigOverride()


@dataclass(slots=True)
class AttemptTrail:
    """What one attempt leaves behind. Moments are on the monotonic clock; a leg that was never sent has 0."""

    placement: Placement
    placed_s: float = 0.0
    prefill_sent_s: float = 0.0
    prefill_done_s: float | None = None
    last_sent_s: float = 0.0
    """When the leg was sent that answers."""
    first_token_s: float | None = None
    ended_s: float | None = None
    prefill_cached_tokens: int | None = None
    """What the engine of a pair's prefill leg says that it had cached."""
    cached_tokens: int | None = None
    """The same of the leg that answers."""
    kv_bytes: int | None = None
    """What the engine of a pair's decode leg says that it fetched."""
    lost_leg: Leg | None = None
    kv_loss: KvLoss | None = None


class TrafficRecorder:
    """Makes records of what the service hears of. ``clock`` is monotonic, in seconds."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock

    # The fleet

    def worker_changed(self, change: FleetChange, card: WorkerCard) -> None:
        """Something became of a worker."""
        recorder = self._recorder
        known = recorder.workers.get(str(card.worker_id))
        is_alive = change is not FleetChange.SILENT
        if change is FleetChange.CHANGED and known is not None:
            is_alive = known.alive  # a card may be published again by one that does not answer here
        worker = _worker_of(card, is_alive=is_alive)
        recorder.note_worker(change, worker, at_s=recorder.since_start(self._clock()))

    # Requests

    def call_refused(self, error: KvrouterError, *, route: str, model: str | None, received_s: float) -> None:
        """A call was refused before it was a request."""
        recorder = self._recorder
        recorder.note_refusal(
            RefusalRecord(
                at_s=recorder.since_start(received_s),
                code=error.code,
                http_status=error.status_hint,
                route=route,
                model=model,
            )
        )

    def unread_call_refused(self, code: str, *, http_status: int, route: str | None) -> None:
        """A call was refused before it was read to its end; without a ``route`` also its head."""
        recorder = self._recorder
        recorder.note_refusal(
            RefusalRecord(
                at_s=recorder.since_start(self._clock()), code=code, http_status=http_status, route=route
            )
        )

    def request_ended(
        self,
        request: GenerateRequest,
        origin: Origin,
        *,
        trail: Sequence[AttemptTrail],
        prompt: Prompt,
        error: KvrouterError | None,
        finished: bool,
        begun_s: float,
        first_token_s: float | None,
        output_tokens: int,
    ) -> None:
        """A request ended: finished, with an error, or because its client left.

        Its record is made on the recorder's thread, of what is taken here: several in a row take a fraction
        of the time of one between other things. Neither tokens nor bodies wait for that.
        """
        recorder = self._recorder
        ended = _Ended(
            recorder.workers,
            origin,
            tuple([_kept(attempt) for attempt in trail]),
            begun_s,
            first_token_s,
            self._clock(),
            request.model,
            request.lora_name,
            request.has_media,
            request.sampling.max_tokens,
            prompt.isl_tokens,
            prompt.block_size,
            output_tokens,
            _constraints_of(request),
            Status.FAILED if error is not None else Status.FINISHED if finished else Status.CANCELLED,
            None if error is None else error.code,
            None if error is None else error.status_hint,
            error.refusals if isinstance(error, RoutingRefused) else None,
        )
        recorder.note_request(ended, prompt)


class _Kept(msgspec.Struct, gc=False):
    """What is recorded of an attempt, without its tokens and streams: as in its trail and its placement."""

    decision: Decision
    shape: Shape
    block_size: int
    prompt_tokens: int
    decode_domains: Mapping[str, str]
    prefill_domains: Mapping[str, str]
    placed_s: float
    prefill_sent_s: float
    prefill_done_s: float | None
    last_sent_s: float
    first_token_s: float | None
    ended_s: float | None
    prefill_cached_tokens: int | None
    cached_tokens: int | None
    kv_bytes: int | None
    lost_leg: Leg | None
    kv_loss: KvLoss | None


class _Ended(msgspec.Struct, gc=False):
    """What is recorded of a request, until its record is made.

    Hundreds wait at a time: the collector would run more often for them, and walk them all.
    """

    workers: Mapping[str, Worker]
    origin: Origin
    attempts: tuple[_Kept, ...]
    begun_s: float
    first_token_s: float | None
    ended_s: float
    model: str
    adapter: str | None
    media: bool
    max_tokens: int
    input_tokens: int
    block_size: int
    output_tokens: int
    constraints: Constraints | None
    status: Status
    code: str | None
    http_status: int | None
    refusals: Mapping[Reason, int] | None

    def __call__(self, recorder: Recorder, blocks: bytes) -> RequestRecord:
        """Make the record."""
        origin, begun_s, workers = self.origin, self.begun_s, self.workers
        named = recorder.salt.session
        return RequestRecord(
            at_s=recorder.since_start(begun_s),
            model=self.model,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            blocks=blocks,
            status=self.status,
            route=origin.route,
            adapter=self.adapter,
            media=self.media,
            session=None if origin.session is None else named(origin.session),
            parent=None if origin.parent is None else named(origin.parent),
            constraints=recorder.salted(self.constraints),
            attempts=tuple([_attempt_of(attempt, begun_s, workers) for attempt in self.attempts]),
            first_token_s=_since(begun_s, self.first_token_s),
            ended_s=microseconds(self.ended_s - begun_s),
            code=self.code,
            http_status=self.http_status,
            refusals={reason.value: count for reason, count in (self.refusals or {}).items()},
        )


def _kept(attempt: AttemptTrail) -> _Kept:
    placement = attempt.placement
    return _Kept(
        placement.decision,
        placement.shape,
        placement.block_size,
        placement.prompt.isl_tokens,
        placement.decode_domains,
        placement.prefill_domains,
        attempt.placed_s,
        attempt.prefill_sent_s,
        attempt.prefill_done_s,
        attempt.last_sent_s,
        attempt.first_token_s,
        attempt.ended_s,
        attempt.prefill_cached_tokens,
        attempt.cached_tokens,
        attempt.kv_bytes,
        attempt.lost_leg,
        attempt.kv_loss,
    )


def _since(begun_s: float, at_s: float | None) -> float | None:
    """Return a moment as seconds from a request's arrival; None where it did not come, which 0 says too."""
    return microseconds(at_s - begun_s) if at_s else None


def _attempt_of(attempt: _Kept, begun_s: float, workers: Mapping[str, Worker]) -> AttemptRecord:
    decision = attempt.decision
    constraint = decision.constraint
    decode = LegRecord(
        leg=decision.decode.leg.value,
        worker=str(decision.decode.rank),
        overlap_blocks=decision.decode.overlap_blocks,
        domains=attempt.decode_domains,
        candidates=decision.decode.candidates,
        sent_s=_since(begun_s, attempt.last_sent_s),
        first_token_s=_since(begun_s, attempt.first_token_s),
        last_s=_since(begun_s, attempt.ended_s if attempt.last_sent_s else None),
        cached_tokens=attempt.cached_tokens,
    )
    legs: tuple[LegRecord, ...] = (decode,)
    kv_bytes = None
    if decision.prefill is not None:
        prefill = LegRecord(
            leg=decision.prefill.leg.value,
            worker=str(decision.prefill.rank),
            overlap_blocks=decision.prefill.overlap_blocks,
            domains=attempt.prefill_domains,
            candidates=decision.prefill.candidates,
            sent_s=_since(begun_s, attempt.prefill_sent_s),
            last_s=_since(
                begun_s, attempt.prefill_done_s or (attempt.ended_s if attempt.prefill_sent_s else None)
            ),
            cached_tokens=attempt.prefill_cached_tokens,
        )
        legs = (prefill, decode)
        kv_bytes = attempt.kv_bytes
        if kv_bytes is None:
            kv_bytes = _expected_kv_bytes(attempt, decision.prefill, workers)
    return AttemptRecord(
        shape=attempt.shape.name.lower(),
        mode=decision.mode.value,
        placed_s=microseconds(attempt.placed_s - begun_s),
        legs=legs,
        constraint=None if constraint is None else _constraint_text(constraint),
        fallback_used=decision.fallback_used,
        cross_domain=decision.cross_domain,
        last_resort=decision.last_resort,
        kv_bytes=kv_bytes,
        kv_bytes_reported=decision.prefill is not None and attempt.kv_bytes is not None,
        lost=None if attempt.lost_leg is None else attempt.lost_leg.value,
        kv_lost=None if attempt.kv_loss is None else attempt.kv_loss.value,
    )


def _expected_kv_bytes(attempt: _Kept, prefill: Pick, workers: Mapping[str, Worker]) -> int | None:
    sender = workers.get(str(prefill.rank.worker_id))
    if sender is None or sender.kv_bytes_per_token is None:
        return None
    there_tokens = attempt.decision.decode.overlap_blocks * attempt.block_size
    return max(0, attempt.prompt_tokens - there_tokens) * sender.kv_bytes_per_token


def _constraint_text(constraint: TransferConstraint) -> str:
    place = constraint.domain if constraint.value is None else f"{constraint.domain}={constraint.value}"
    return f"{type(constraint.policy).__name__.lower()} {place}"


def _constraints_of(request: GenerateRequest) -> Constraints | None:
    """None where it asks for nothing."""
    asked, override = request.constraints, request.override
    if (
        asked == _NOTHING_ASKED
        and override == _NOTHING_OVERRIDDEN
        and request.pin is None
        and request.prefill_pin is None
    ):
        return None
    required = asked.required_taints
    if request.lora_name is not None:  # the adapter says it
        required -= {adapter_taint(request.lora_name)}
    found = Constraints(
        required_taints=tuple(sorted(required)),
        required_decode_taints=tuple(sorted(asked.required_decode_taints)),
        preferred_taints={str(taint): weight for taint, weight in asked.preferred_taints.items()},
        pin=_pin_text(request.pin),
        prefill_pin=_pin_text(request.prefill_pin),
        overlap_score_weight=override.overlap_score_weight,
        router_temperature=override.router_temperature,
        router_mode=None if override.router_mode is None else override.router_mode.value,
    )
    return None if found == Constraints() else found


def _pin_text(pin: Pin | None) -> str | None:
    if pin is None:
        return None
    return str(pin.worker_id) if pin.dp_rank is None else f"{pin.worker_id}/{pin.dp_rank}"


def _worker_of(card: WorkerCard, *, is_alive: bool) -> Worker:
    config = card.runtime_config
    enforcement = config.kv_transfer_enforcement
    return Worker(
        worker=str(card.worker_id),
        model=card.model,
        role=card.role.value,
        block_size=card.block_size,
        context_length=card.context_length,
        dp_size=card.dp_size,
        dp_start=card.dp_start,
        kv_blocks=config.total_kv_blocks,
        kv_bytes_per_token=config.kv_bytes_per_token,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        domains=topology_domains(config),
        levels=config.topology_levels,
        taints=tuple(sorted(worker_taints(config))),
        transfer_domain=config.kv_transfer_domain,
        enforcement=None if enforcement is None else enforcement.value,
        preferred_weight=config.kv_transfer_preferred_weight,
        engine=card.engine,
        draining=card.draining,
        engine_silent=card.engine_silent,
        alive=is_alive,
    )
