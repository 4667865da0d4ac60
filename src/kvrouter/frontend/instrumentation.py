"""The frontend's metrics and log events."""

import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import CallRoute, TraceContext
from kvrouter.frontend.http import HttpServer
from kvrouter.frontend.request_stats import EndedCall, RequestStatistics
from kvrouter.kernel.placement.placement import Placement
from kvrouter.router.generation import Generation
from kvrouter.router.instrumentation import add_decision, expected_tokens
from kvrouter.telemetry import Event, Fields, GenAiMetrics, Telemetry, log_enabled_event, log_event
from kvrouter.telemetry.logs import LogThrottle, lines_lost

logger = logging.getLogger("kvrouter.frontend")

HINTS_LOGGED_MAX = 64
"""The most names of ignored routing hints that are logged: clients can invent any number."""

UNKNOWN_ROUTE = "unknown"
"""The label of requests with an unknown path, or refused before their path was read."""

UNKNOWN_MODEL = "unknown"
"""The label of calls without a served model: names that clients invent are not labels."""


class RefusalCounts(NamedTuple):
    """Counts of worker ranks that decisions refused, and of error answers, as (label, label, count)."""

    ranks: list[tuple[str, str, int]]
    answers: list[tuple[str, str, int]]


class FrontendInstrumentation:
    """Counts and logs the frontend's events; :mod:`kvrouter.router.instrumentation` has those of routing."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._hints_logged: set[str] = set()
        self._by_engine_throttle = LogThrottle(again_after_s=inf)
        self.stats = RequestStatistics()
        self.tokenized = telemetry.tokenization_duration.observe
        """Records one templating and tokenization: seconds, and the model."""
        self.http_events, self.http_connections = telemetry.http_events, telemetry.http_connections

    def answered(
        self,
        *,
        route: str,
        model: str | None,
        status: int,
        request_id: str,
        trace: TraceContext,
        duration_s: float,
        code: str | None = None,
        generation: Generation | None = None,
        placement: Placement | None = None,
    ) -> None:
        """One call ended with this status (499: its client disconnected first), and with ``code`` after an
        error. ``generation`` is None when no engine was asked; ``placement`` is that of a call without a
        generation.
        """
        label, call = model or UNKNOWN_MODEL, _ended_call(generation, is_error=code is not None)
        self._telemetry.requests.inc(route, label, str(status))
        if route in _GENERATION_ROUTES:
            self.stats.ended(model, call)
        if self._telemetry.gen_ai is not None and generation is not None:
            operation = _OPERATIONS.get(route, route)
            _observe_gen_ai(self._telemetry.gen_ai, operation, generation, duration_s=duration_s, code=code)
        if not logger.isEnabledFor(logging.INFO):
            return
        fields: Fields = {"request_id": request_id, "route": route, "model": label}
        if trace.trace_id:
            fields["trace_id"] = trace.trace_id
        fields["status"] = status
        if code is not None:
            fields["code"] = code
        if generation is not None:
            placement = generation.placement
        if placement is not None:
            add_decision(fields, placement)
            fields["attempts"] = placement.decision.attempt + 1 if generation is None else generation.attempts
            fields["isl_tokens"] = placement.prompt.isl_tokens
        if generation is not None:
            if placement is not None:
                fields["resumes"] = generation.resumes
                fields["predicted_tokens"] = expected_tokens(placement) or 0
            fields["ttft_s"] = call.ttft_s
            fields["isl_tokens"] = call.prompt_tokens
            fields["cached_tokens"] = call.reported_tokens or 0
            fields["output_tokens"] = call.completion_tokens
        fields["duration_s"] = duration_s
        log_enabled_event(logger, Event.REQUEST_ENDED, fields)

    def body_refused(self, bound: str) -> None:
        """A body exceeded this bound."""
        self._telemetry.bodies_refused.inc(bound)

    def failed(self, error: KvrouterError, *, model: str | None = None) -> None:
        """One request was answered with this error, as a status or as the last event of its stream."""
        self._telemetry.errors.inc(model or UNKNOWN_MODEL, error.code)

    def admin_failed(self, route: str, error: KvrouterError) -> None:
        """An operator's call was answered with this error: it is no request of a client."""
        self._telemetry.admin_errors.inc(route, error.code)

    def error_answered(self, code: str) -> None:
        """The HTTP server answered with an error without a handler."""
        self._telemetry.errors.inc(UNKNOWN_MODEL, code)

    def prompt_refused(self, code: str) -> None:
        """A prompt was refused before or during its tokenization."""
        self._telemetry.prompts_refused.inc(code)

    def chat_unrendered(self, model: str, reason: str) -> None:
        """A chat could not be rendered into a prompt, and is routed by load."""
        self._telemetry.chats_unrendered.inc(model, reason)

    def chat_template_failed(self, model: str, reason: str) -> None:
        """Chats of a model cannot be rendered, for a reason that was not logged before."""
        log_event(logger, Event.CHAT_TEMPLATE_FAILED, model=model, reason=reason)

    def tokenizing(self, held_bytes: int) -> None:
        """Set the estimated memory of the prompts that are being tokenized."""
        self._telemetry.tokenize_bytes.set(held_bytes)

    def tokenized_by_engine(self, model: str, why: str) -> None:
        """An engine tokenized a prompt; logged once per model and reason."""
        if self._by_engine_throttle.allows(f"{model} {why}"):
            log_event(logger, Event.TOKENIZED_BY_ENGINE, model=model, reason=why)

    def by_load(self, models: Mapping[str, bool]) -> None:
        """Set which models are routed by load because the router cannot tokenize their prompts."""
        self._telemetry.routed_by_load.replace(
            {(model,): float(is_by_load) for model, is_by_load in models.items()}
        )

    def thresholds_set(self, *, model: str, decode_blocks: float | None, prefill_tokens: int | None) -> None:
        """A model's busy thresholds were set."""
        log_event(
            logger,
            Event.BUSY_THRESHOLD,
            model=model,
            active_decode_blocks_threshold=decode_blocks,
            active_prefill_tokens_threshold=prefill_tokens,
        )

    def routing_hint_ignored(self, at: str, why: str) -> None:
        """A routing hint was ignored; logged once per name, for the first ``HINTS_LOGGED_MAX`` names."""
        name = at.partition("[")[0]
        if name in self._hints_logged or len(self._hints_logged) >= HINTS_LOGGED_MAX:
            return
        self._hints_logged.add(name)
        log_event(logger, Event.ROUTING_HINT_IGNORED, detail=f"{at}: {why}")

    def refusals(self) -> RefusalCounts:
        """Return the refusals since the process began."""
        telemetry = self._telemetry
        return RefusalCounts(
            ranks=sorted((reason, role, int(n)) for (reason, role), n in telemetry.refusals.counts().items()),
            answers=sorted((model, code, int(n)) for (model, code), n in telemetry.errors.counts().items()),
        )

    def watch(self, server: HttpServer) -> Callable[[], None]:
        """Read the server's held bytes and the log's lost lines before each scrape; return a function that
        ends that.
        """
        held, lost = self._telemetry.http_upload_bytes, self._telemetry.log_lines_lost

        def refresh() -> None:
            held.set(server.uploads.bytes)
            lost.inc(by=lines_lost() - lost.value())

        return self._telemetry.before_scrape(refresh)


_GENERATION_ROUTES = frozenset(route.value for route in CallRoute if route.generates is not None)


def _ended_call(generation: Generation | None, *, is_error: bool) -> EndedCall:
    if generation is None:
        return EndedCall(is_error)
    times, usage = generation.times, generation.usage
    return EndedCall(
        is_error,
        ttft_s=None if times.first_token_s is None else times.first_token_s - times.begun_s,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        predicted_tokens=generation.expected_cached_tokens,
        reported_tokens=generation.reported_cached_tokens,
    )


_OPERATIONS = {CallRoute.CHAT.value: "chat", CallRoute.COMPLETION.value: "text_completion"}

PROVIDER = "kvrouter"
"""OpenTelemetry's ``gen_ai.provider.name``: the answering system, as clients see it."""


def _observe_gen_ai(
    metrics: GenAiMetrics,
    operation: str,
    generation: Generation,
    *,
    duration_s: float,
    code: str | None,
) -> None:
    labels = operation, PROVIDER, generation.request.model
    times, usage = generation.times, generation.usage
    metrics.request_duration.observe(duration_s, *labels, code or "")
    if times.first_token_s is None:
        return
    metrics.time_to_first_token.observe(times.first_token_s - times.begun_s, *labels)
    metrics.operation_input_tokens.observe(usage.prompt_tokens, *labels)
    metrics.operation_output_tokens.observe(usage.completion_tokens, *labels)
    modality = "unknown" if generation.request.has_media else "text"
    metrics.input_tokens.inc(*labels, modality, by=usage.prompt_tokens)
    metrics.output_tokens.inc(*labels, "text", by=usage.completion_tokens)
    metrics.cache_read_tokens.inc(*labels, modality, by=usage.cached_tokens)
    if times.ended_s is not None and usage.completion_tokens > 1:
        each_s = (times.ended_s - times.first_token_s) / (usage.completion_tokens - 1)
        metrics.time_per_output_token.observe(each_s, *labels)
