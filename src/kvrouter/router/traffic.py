"""Traffic recording: makes records of ended requests, refused calls and fleet changes."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import KvrouterError, RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.requests import GenerateRequest, Leg, TraceContext
from kvrouter.core.taints import adapter_taints, worker_taints
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, CONTEXT_TOKENS_UNKNOWN, WorkerCard
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt
from kvrouter.kernel.routing.interface import Pick
from kvrouter.kernel.topology.policy import TransferConstraint
from kvrouter.recording.recorder import Recorder
from kvrouter.recording.request import AttemptFields, LegFields, RequestDetails
from kvrouter.recording.schema import Constraints, FleetChange, RefusalRecord, Status, Worker


class Origin(msgspec.Struct, frozen=True, gc=False):
    """A call's route and the client's session ids: its own session, and the parent session that began it."""

    route: str | None = None
    session: str | None = None
    parent: str | None = None


NO_ORIGIN = Origin()

_FINISHED, _FAILED, _CANCELLED = Status.FINISHED, Status.FAILED, Status.CANCELLED
"""Attributes of an enumeration are slow before Python 3.12."""


class LegSpans(Protocol):
    """Makes the trace spans of one request's legs."""

    def leg(self, attempt: Attempt, leg: Leg) -> TraceContext:
        """Begin the span of a leg that is about to be sent; return the trace context for its engine."""


class TrafficRecorder:
    """Makes records of traffic. ``clock`` is monotonic, in seconds."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock

    @property
    def is_recording(self) -> bool:
        """Whether records are written; False after a full disk or another error ended the recording."""
        return self._recorder.is_recording

    # The fleet

    def worker_changed(self, change: FleetChange, card: WorkerCard) -> None:
        """Record a change of a worker."""
        recorder = self._recorder
        known = recorder.workers.get(str(card.worker_id))
        is_alive = change is not FleetChange.SILENT
        if change is FleetChange.CHANGED and known is not None:
            is_alive = known.alive  # a worker that does not answer here may still publish its card
        worker = _worker_of(card, is_alive=is_alive)
        recorder.note_worker(change, worker, at_s=recorder.since_start(self._clock()))

    # Requests

    def call_refused(self, error: KvrouterError, *, route: str, model: str | None, received_s: float) -> None:
        """Record a call that was refused before it became a request."""
        recorder = self._recorder
        recorder.note_refusal(
            RefusalRecord(
                at_s=recorder.since_start(received_s),
                code=error.code,
                http_status=error.http_status,
                route=route,
                model=model,
            )
        )

    def unread_call_refused(self, code: str, *, http_status: int, route: str | None) -> None:
        """Record a call that was refused unread; ``route`` is None where its head was not read either."""
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
        trail: Sequence[Attempt],
        prompt: Prompt,
        error: KvrouterError | None,
        finished: bool,
        begun_s: float,
        first_token_s: float | None,
        output_tokens: int,
    ) -> None:
        """Record a request that finished, failed, or was cancelled by its client."""
        ended_s = self._clock()
        recorder = self._recorder
        workers = recorder.workers
        recorder.note_request(
            prompt,
            (
                request.model,
                request.lora_name,
                request.has_media,
                request.sampling.max_tokens,
                output_tokens,
                _FAILED if error is not None else _FINISHED if finished else _CANCELLED,
                origin.route,
                begun_s,
                first_token_s,
                ended_s,
                tuple([_attempt_fields(attempt, workers) for attempt in trail]),
            ),
            self._details(request, origin, error),
        )

    def _details(
        self, request: GenerateRequest, origin: Origin, error: KvrouterError | None
    ) -> RequestDetails | None:
        """The rarely used fields of a request; None where all are empty."""
        constraints = _constraints_of(request)
        session, parent = origin.session, origin.parent
        by_text = request.text_ids is not None
        if constraints is None and session is None and parent is None and error is None and not by_text:
            return None
        recorder = self._recorder
        named = recorder.salt.session
        refusals = error.refusals if isinstance(error, RoutingRefused) else {}
        return RequestDetails(
            session=None if session is None else named(session),
            parent=None if parent is None else named(parent),
            by_text=by_text,
            constraints=recorder.salted(constraints),
            code=None if error is None else error.code,
            http_status=None if error is None else error.http_status,
            refusals={reason.value: count for reason, count in refusals.items()},
        )


def _attempt_fields(attempt: Attempt, workers: Mapping[str, Worker]) -> AttemptFields:
    placement = attempt.placement
    decision = placement.decision
    pick, constraint = decision.decode, decision.constraint
    ended_s, last_sent_s = attempt.ended_s, attempt.last_sent_s
    decode: LegFields = (
        pick.leg,
        pick.rank,
        pick.overlap_blocks,
        placement.decode_domains,
        pick.candidates,
        last_sent_s,
        attempt.first_token_s,
        ended_s if last_sent_s else None,
        attempt.cached_tokens,
    )
    legs: tuple[LegFields, ...] = (decode,)
    kv_bytes = None
    if decision.prefill is not None:
        legs = (_prefill_fields(attempt, decision.prefill), decode)
        kv_bytes = attempt.kv_bytes
        if kv_bytes is None:
            kv_bytes = _expected_kv_bytes(placement, decision.prefill, workers)
    return (
        placement.shape,
        decision.mode,
        attempt.placed_s,
        legs,
        kv_bytes,
        decision.prefill is not None and attempt.kv_bytes is not None,
        None if constraint is None else _constraint_text(constraint),
        decision.fallback_used,
        decision.cross_domain,
        decision.last_resort,
        attempt.lost_leg,
        attempt.kv_loss,
    )


def _prefill_fields(attempt: Attempt, pick: Pick) -> LegFields:
    sent_s = attempt.prefill_sent_s
    return (
        pick.leg,
        pick.rank,
        pick.overlap_blocks,
        attempt.placement.prefill_domains,
        pick.candidates,
        sent_s,
        None,
        attempt.prefill_done_s or (attempt.ended_s if sent_s else None),
        attempt.prefill_cached_tokens,
    )


def _expected_kv_bytes(placement: Placement, prefill: Pick, workers: Mapping[str, Worker]) -> int | None:
    sender = workers.get(str(prefill.rank.worker_id))
    if sender is None or sender.kv_bytes_per_token is None:
        return None
    there_tokens = placement.decision.decode.overlap_blocks * placement.block_size
    return max(0, placement.prompt.isl_tokens - there_tokens) * sender.kv_bytes_per_token


def _constraint_text(constraint: TransferConstraint) -> str:
    place = constraint.domain if constraint.value is None else f"{constraint.domain}={constraint.value}"
    return f"{type(constraint.policy).__name__.lower()} {place}"


def _constraints_of(request: GenerateRequest) -> Constraints | None:
    """The request's constraints; None where it has none."""
    asked, override = request.constraints, request.override
    if not (  # most requests have none: checked without a function call
        asked.required_taints
        or asked.required_decode_taints
        or asked.preferred_taints
        or override.overlap_score_weight is not None
        or override.router_temperature is not None
        or override.router_mode is not None
        or request.pin is not None
        or request.prefill_pin is not None
    ):
        return None
    required = asked.required_taints - adapter_taints([request.lora_name])  # the record has the adapter
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
        block_size=card.block_size or BLOCK_SIZE_UNKNOWN,
        context_length=card.context_length or CONTEXT_TOKENS_UNKNOWN,
        dp_size=card.dp_size,
        dp_start=card.dp_start,
        kv_blocks=config.total_kv_blocks,
        kv_bytes_per_token=config.kv_bytes_per_token,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        domains=config.domains,
        levels=config.topology_levels,
        taints=tuple(sorted(worker_taints(config))),
        transfer_domain=config.kv_transfer_domain,
        enforcement=None if enforcement is None else enforcement.value,
        preferred_weight=config.kv_transfer_preferred_weight,
        prompt_tokens_min=config.prompt_tokens_min,
        prompt_tokens_max=config.prompt_tokens_max,
        decode_only=card.decode_only,
        kv_format=config.kv_format,
        engine=card.engine,
        draining=card.draining,
        engine_silent=card.engine_silent,
        alive=is_alive,
    )
