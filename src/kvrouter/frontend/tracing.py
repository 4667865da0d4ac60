"""The OpenTelemetry spans of a request: one for its call, and children for the work on it.

::

    POST /v1/chat/completions   the call, under the span that its ``traceparent`` names
      receive                   from its head to the last byte of its body
      tokenize                  parsing the call, rendering and tokenizing its prompt
      queue, decide             of each attempt: the wait for a worker, and the decision
      prefill, decode           of each attempt: its legs, the parents of the engines' spans; or
      aggregated                one leg for both, with a prefill and a decode span inside
      transfer                  between a pair's legs: from the end of prefill to the first token

The legs of an attempt are linked to those of the attempt before it. A standalone router's call has
``receive``, ``tokenize``, and either ``queue`` and ``decide`` or ``prefill``.
"""

import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import Leg, TraceContext
from kvrouter.frontend.http import Request
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.request_driver import Attempt
from kvrouter.kernel.routing.interface import Decision, Pick
from kvrouter.router.generation import Generation

Attributes = dict[str, str | bool | int | float]

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTracing:
    """Starts the spans of calls."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, request: Request, client_trace: TraceContext) -> "RequestSpans":
        """Start the span of a call; ``client_trace`` is the trace context of its client."""
        return RequestSpans(self._tracer, request, client_trace)


class RequestSpans:
    """The spans of one call. Spans of legs start as the legs are sent, because engines get their ids; the
    others are created at the end of the call from recorded times.
    """

    def __init__(self, tracer: Tracer, request: Request, client_trace: TraceContext) -> None:
        self._tracer = tracer
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._baggage = client_trace.baggage
        self._received_s = time.monotonic()
        self._began_s = request.began_s or self._received_s
        self._prepared_s: float | None = None
        self._legs: list[tuple[int, Leg, Span]] = []
        self._span = tracer.start_span(
            f"{request.method} {request.path}",
            _PROPAGATOR.extract(client_trace.headers(), Context()),
            SpanKind.SERVER,
            {
                "http.request.method": request.method,
                "http.route": request.path,
                "url.path": request.path,
                "url.scheme": "http",
                "network.protocol.version": request.head.http_version,
            },
            start_time=self._at_ns(self._began_s),
        )
        self._inside = set_span_in_context(self._span, Context())
        self.trace = self._carried_by(self._span)
        """The trace context of the call's own span."""

    def prepared(self) -> None:
        """Record that the call is parsed and its prompt tokenized."""
        self._prepared_s = time.monotonic()

    def leg(self, attempt: Attempt, leg: Leg) -> TraceContext:
        """Start the span of a leg that is about to be sent; return the trace context for its engine."""
        if not self._span.is_recording():
            return self.trace
        decision = attempt.placement.decision
        number = decision.attempt
        pick = attempt.placement.prefill_pick if leg is Leg.PREFILL else decision.decode
        before = [span for at, _, span in self._legs if at == number - 1]
        span = self._tracer.start_span(
            leg.value,
            self._inside,
            SpanKind.CLIENT,
            {**_worker_attributes(pick), "kvrouter.attempt": number},
            links=[Link(span.get_span_context(), {"kvrouter.attempt": number - 1}) for span in before],
        )
        self._legs.append((number, leg, span))
        return self._carried_by(span)

    def end(
        self,
        *,
        status: int,
        model: str | None,
        request_id: str,
        error: KvrouterError | None,
        generation: Generation | None,
    ) -> None:
        """End all spans of a call that was answered, failed, or lost its client."""
        now_s = time.monotonic()
        if self._span.is_recording() and generation is not None:
            self._add_attempts(generation.trail, self._prepared_s or now_s, now_s)
            self._span.set_attributes(_answer_attributes(generation))
        for _, _, span in self._legs:
            span.end(self._at_ns(now_s))  # a second end has no effect
        self._end_call(now_s, status=status, model=model, request_id=request_id, error=error)

    def end_routed(
        self,
        *,
        status: int,
        model: str | None,
        request_id: str,
        error: KvrouterError | None,
        decision: Decision | None,
        decided_s: float | None,
    ) -> None:
        """End all spans of a standalone router's call. ``decided_s`` is the duration of the decision in
        seconds; None for a prefill: one span covers decision and leg.
        """
        now_s = time.monotonic()
        if self._span.is_recording() and self._prepared_s is not None and decision is not None:
            found = _decision_attributes(decision)
            if decided_s is None:
                self._child("prefill", self._prepared_s, now_s, found)
            else:
                from_s = max(self._prepared_s, now_s - decided_s)
                self._child("queue", self._prepared_s, from_s)
                self._child("decide", from_s, now_s, found)
        self._end_call(now_s, status=status, model=model, request_id=request_id, error=error)

    def _end_call(
        self, now_s: float, *, status: int, model: str | None, request_id: str, error: KvrouterError | None
    ) -> None:
        if self._span.is_recording():
            self._child("receive", self._began_s, self._received_s)
            self._child("tokenize", self._received_s, self._prepared_s or now_s)
            self._span.set_attributes(
                {"kvrouter.request_id": request_id, "http.response.status_code": status}
            )
            if model is not None:
                self._span.set_attribute("kvrouter.model", model)
            if error is not None:
                self._span.set_attribute("error.type", error.code)
            if status >= 500:
                self._span.set_status(Status(StatusCode.ERROR, None if error is None else error.code))
        self._span.end(self._at_ns(now_s))

    def _add_attempts(self, trail: Sequence[Attempt], prepared_s: float, now_s: float) -> None:
        wanted_s = prepared_s
        for attempt in trail:
            ended_s = attempt.ended_s or now_s
            decided_s = attempt.placed_s - attempt.placement.decision_s
            self._child("queue", wanted_s, decided_s)
            self._child(
                "decide",
                decided_s,
                attempt.placed_s,
                {
                    **_decision_attributes(attempt.placement.decision),
                    "kvrouter.shape": attempt.placement.shape.value,
                },
            )
            for at, leg, span in self._legs:
                if at == attempt.placement.decision.attempt:
                    self._end_leg(attempt, leg, span, ended_s)
            wanted_s = ended_s

    def _end_leg(self, attempt: Attempt, leg: Leg, span: Span, ended_s: float) -> None:
        first_s, until_s = attempt.first_token_s, ended_s
        match leg:
            case Leg.PREFILL:
                until_s = attempt.prefill_done_s or ended_s
                _set_tokens(span, attempt.placement, attempt.prefill_cached_tokens)
            case Leg.DECODE:
                if attempt.prefill_done_s is not None and first_s is not None:
                    self._child("transfer", attempt.prefill_done_s, first_s, _transfer_attributes(attempt))
            case Leg.AGGREGATED:
                _set_tokens(span, attempt.placement, attempt.cached_tokens)
                inside = set_span_in_context(span, Context())
                self._child("prefill", attempt.last_sent_s, first_s or ended_s, inside=inside)
                if first_s is not None:
                    self._child("decode", first_s, ended_s, inside=inside)
        if leg is not Leg.PREFILL and first_s is not None:
            span.add_event("first_token", timestamp=self._at_ns(first_s))
        if attempt.lost_leg is leg:
            span.set_status(Status(StatusCode.ERROR, "the worker lost it"))
        if attempt.kv_loss is not None and leg is Leg.DECODE:
            span.set_attribute("kvrouter.kv_loss", attempt.kv_loss.value)
        span.end(self._at_ns(until_s))

    def _child(
        self,
        name: str,
        from_s: float,
        to_s: float,
        attributes: Mapping[str, str | bool | int | float] | None = None,
        *,
        inside: Context | None = None,
    ) -> None:
        """Add an ended span between two times of the monotonic clock."""
        span = self._tracer.start_span(
            name, inside or self._inside, attributes=attributes, start_time=self._at_ns(from_s)
        )
        span.end(self._at_ns(max(from_s, to_s)))

    def _at_ns(self, moment_s: float) -> int:
        """Convert a monotonic time to the wall clock, in nanoseconds since 1970."""
        return round(moment_s * 1e9) + self._wall_ns

    def _carried_by(self, span: Span) -> TraceContext:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
        return TraceContext(
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            baggage=self._baggage,
            trace_id=f"{span.get_span_context().trace_id:032x}",
        )


def _worker_attributes(pick: Pick, prefix: str = "kvrouter.") -> Attributes:
    return {f"{prefix}worker": str(pick.rank.worker_id), f"{prefix}dp_rank": int(pick.rank.dp_rank)}


def _set_tokens(span: Span, placement: Placement, cached_tokens: int | None) -> None:
    span.set_attribute("kvrouter.prompt_tokens", placement.prompt.isl_tokens)
    if cached_tokens is not None:
        span.set_attribute("kvrouter.cached_tokens", cached_tokens)


def _decision_attributes(decision: Decision) -> Attributes:
    """Return the attributes of a decision, with the terms of the cost of each leg."""
    constraint = decision.constraint
    found: Attributes = {
        "kvrouter.attempt": decision.attempt,
        "kvrouter.mode": decision.mode.value,
        "kvrouter.fallback_used": decision.fallback_used,
        "kvrouter.cross_domain": decision.cross_domain,
        "kvrouter.last_resort": decision.last_resort,
    }
    if constraint is not None:
        found["kvrouter.constraint"] = type(constraint.policy).__name__.lower()
        found["kvrouter.domain"] = constraint.domain
    for pick in (decision.decode, decision.prefill):
        if pick is None:
            continue
        prefix = f"kvrouter.{pick.leg.value}."
        found |= _worker_attributes(pick, prefix)
        for name in (
            "cost",
            "overlap_blocks",
            "prefill_blocks",
            "decode_blocks",
            "transfer_blocks",
            "multiplier",
            "candidates",
        ):
            found[prefix + name] = getattr(pick, name)
        if pick.times is not None:
            found[f"{prefix}expected_ms"] = 1e3 * pick.times.expected_s
            for name, seconds in pick.times._asdict().items():
                found[f"{prefix}{name.removesuffix('_s')}_ms"] = 1e3 * seconds
    return found


def _transfer_attributes(attempt: Attempt) -> Attributes:
    placement = attempt.placement
    found: Attributes = {}
    for end, domains in (("prefill", placement.prefill_domains), ("decode", placement.decode_domains)):
        if domains:
            found[f"kvrouter.{end}.domains"] = ",".join(f"{name}={value}" for name, value in domains.items())
    if attempt.kv_bytes is not None:
        found["kvrouter.kv_bytes"] = attempt.kv_bytes
    return found


def _answer_attributes(generation: Generation) -> Attributes:
    usage = generation.usage
    return {
        "kvrouter.attempts": generation.attempts,
        "kvrouter.prompt_tokens": usage.prompt_tokens,
        "kvrouter.cached_tokens": usage.cached_tokens,
        "kvrouter.completion_tokens": usage.completion_tokens,
    }
