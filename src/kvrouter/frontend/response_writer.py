"""Writes one call's response: status, headers, request id, errors."""

import asyncio
import re
import time
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from urllib.parse import quote

from kvrouter.core.engine_answer import passed_headers
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, RequestId, WorkerRank, new_request_id
from kvrouter.frontend.errors import (
    JSON_HEADERS,
    anthropic_error_event,
    error_event,
    error_headers,
    failure_body,
)
from kvrouter.frontend.http import SSE_FILLER, Disconnect, Responder, Stream
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.keep_alive import KeepAliveStream
from kvrouter.frontend.openai.answers import AnswerFormat, RouteKind, answer_id
from kvrouter.frontend.openai.parse import Call
from kvrouter.frontend.openai.passed_routes import PassedRoute
from kvrouter.kernel.routing.interface import Decision
from kvrouter.router.generation import Generation

ENCODED_MAX = 4096
"""Cache size for the headers of ranks, domains and values: a fleet has few, and answers repeat them."""


def routing_headers(generation: Generation) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers with the workers that answered, their domains, and the predicted overlap."""
    placement = generation.placement
    if placement is None:
        return ()
    decision = placement.decision
    headers = [
        *_rank_headers(b"decode", decision.decode.rank),
        (b"x-kvrouter-decode-domain", _domains(placement.decode_domains)),
        (b"x-kvrouter-overlap-blocks", str(decision.prefilling.overlap_blocks).encode()),
    ]
    if decision.prefill is not None:
        headers.extend(_rank_headers(b"prefill", decision.prefill.rank))
        headers.append((b"x-kvrouter-prefill-domain", _domains(placement.prefill_domains)))
    return tuple(headers)


def routing_nvext(generation: Generation, extra_fields: Collection[str]) -> Mapping[str, object] | None:
    """Return the answer's ``nvext`` with the requested ``extra_fields``; None if there are none."""
    placement = generation.placement
    if placement is None or not extra_fields:
        return None
    nvext: dict[str, object] = {}
    if "worker_id" in extra_fields:
        nvext["worker_id"] = _workers(placement.decision)
    if "timing" in extra_fields:
        nvext["timing"] = _timing(generation)
    return nvext


def query_workers(decision: Decision) -> Mapping[str, object]:
    """Return the workers that a request would go to; a worker for both legs is named twice."""
    workers = _workers(decision)
    rank = decision.decode.rank
    return {"prefill_worker_id": rank.worker_id, "prefill_dp_rank": rank.dp_rank} | workers


def _workers(decision: Decision) -> dict[str, object]:
    workers: dict[str, object] = {
        "decode_worker_id": decision.decode.rank.worker_id,
        "decode_dp_rank": decision.decode.rank.dp_rank,
    }
    if decision.prefill is not None:
        workers["prefill_worker_id"] = decision.prefill.rank.worker_id
        workers["prefill_dp_rank"] = decision.prefill.rank.dp_rank
    return workers


def _timing(generation: Generation) -> dict[str, object]:
    times, usage = generation.times, generation.usage
    timing: dict[str, object] = {"kv_hit_rate": round(usage.cached_tokens / max(1, usage.prompt_tokens), 4)}
    for name, moment_s in (
        ("queue_ms", times.placed_s),
        ("ttft_ms", times.first_token_s),
        ("total_time_ms", times.ended_s),
    ):
        if moment_s is not None:
            timing[name] = round(1e3 * (moment_s - times.begun_s), 3)
    return timing


@lru_cache(maxsize=ENCODED_MAX)
def _rank_headers(leg: bytes, rank: WorkerRank) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"x-kvrouter-%s-worker" % leg, b"%d" % rank.worker_id),
        (b"x-kvrouter-%s-dp-rank" % leg, b"%d" % rank.dp_rank),
    )


def _domains(domains: Mapping[str, str]) -> bytes:
    """Return ``zone=a,rack=r1``; ``,``, ``=`` and characters not allowed in headers are percent-encoded."""
    text = ",".join(f"{_quoted(domain)}={_quoted(value)}" for domain, value in domains.items())
    return text.encode()


@lru_cache(maxsize=ENCODED_MAX)
def _quoted(text: str) -> str:
    return quote(text, safe="-._~:/@+ ")


TEXT_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"),)

EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


EventStream = Stream | KeepAliveStream
"""A stream of server-sent events."""


class ResponseWriter:
    """Writes the response to one call, and keeps its status, error and model for the log."""

    __slots__ = (
        "_decision",
        "_keep_alive",
        "_responder",
        "_routing_headers",
        "_stream",
        "error",
        "generation",
        "kind",
        "model",
        "request_id",
        "status",
    )

    def __init__(self, kind: RouteKind | PassedRoute, responder: Responder, request_id: RequestId) -> None:
        self.kind = kind
        self.model: ModelName | None = None
        self.request_id = request_id
        self.status = KvrouterError.status_hint
        """The status that the call ended with; 500 until it is answered."""
        self.error: KvrouterError | None = None
        """The error that the call was answered with, or that ended its stream."""
        self.generation: Generation | None = None
        """The running request; None until it is routed."""
        self._responder = responder
        self._stream: EventStream | None = None
        self._keep_alive: KeepAliveStream | None = None
        self._decision: Decision | None = None
        self._routing_headers: ResponseHeaders = ()

    async def send(self, generation: Generation, body: bytes, headers: ResponseHeaders = ()) -> None:
        """Send a complete answer, JSON or an engine's text; ``headers`` are the engine's."""
        self.status = 200
        is_text = isinstance(self.kind, PassedRoute) and self.kind.is_form and body[:1] != b"{"
        fixed = TEXT_HEADERS if is_text else JSON_HEADERS
        await self._responder.send(200, self._headers(fixed, generation, headers), body)

    async def send_query(self, call: Call, body: bytes) -> None:
        """Send the complete answer to a routing query."""
        self.status = 200
        fixed = EVENT_HEADERS if call.stream else JSON_HEADERS
        await self._responder.send(200, (*fixed, (b"x-request-id", self.request_id.encode())), body)

    def keep_alive(self, generation: Generation, interval_s: float) -> None:
        """Write a comment whenever nothing else was written for ``interval_s``. A comment before the first
        event starts the stream, after which an error can no longer have a status.
        """
        self._keep_alive = KeepAliveStream(partial(self._start_stream, generation), interval_s)

    def prepare(self, generation: Generation) -> None:
        """Make the headers of the workers to which the legs are sent, unless they are those of this decision:
        early, while the workers work; anew where the request was sent again or its decode worker changed.
        """
        placement = generation.placement
        decision = None if placement is None else placement.decision
        if decision is not self._decision:
            self._decision, self._routing_headers = decision, routing_headers(generation)

    def begin_stream(self, generation: Generation, headers: ResponseHeaders = ()) -> EventStream:
        """Start the stream of server-sent events; ``headers`` are the engine's.

        Callers do so once they have the first event, so that earlier errors have a status.
        """
        if self._keep_alive is None:
            self._stream = self._start_stream(generation, headers)
        else:
            self._keep_alive.begin(headers)
            self._stream = self._keep_alive
        return self._stream

    def _start_stream(self, generation: Generation, headers: ResponseHeaders) -> Stream:
        headers = self._headers(EVENT_HEADERS, generation, headers)
        return self._responder.start_stream(200, headers, filler=SSE_FILLER)

    def flush(self) -> None:
        """Send what was written to the stream now, not in the next turn of the event loop."""
        self._responder.flush()

    def end_stream(self, stream: EventStream) -> None:
        """End a complete stream."""
        stream.end()
        self.status = 200

    def close(self) -> None:
        """Stop the keep-alive comments. Idempotent."""
        if self._keep_alive is not None:
            self._keep_alive.stop()

    def fail(self, error: KvrouterError) -> None:
        """Answer with an error: as a status, or as the last event of a started stream. An engine's own error
        answer passes through unchanged.
        """
        self.status = error.http_status
        self.error = error
        is_anthropic = isinstance(self.kind, PassedRoute) and self.kind.is_anthropic
        answer = error.answer
        if self._keep_alive is not None and self._keep_alive.has_begun:
            self._stream = self._keep_alive
        if self._stream is not None:
            event = anthropic_error_event(error) if is_anthropic else error_event(error)
            self._stream.write(answer.body if answer is not None and answer.is_events else event)
            self._stream.end()
            return
        request_id = (b"x-request-id", self.request_id.encode())
        if answer is not None:
            headers = (*passed_headers(answer.headers, of_error=True), request_id)
            self._responder.answer(answer.status, headers, answer.body)
            return
        body = failure_body(error, is_anthropic=is_anthropic)
        self._responder.answer(error.status_hint, (*error_headers(error), request_id), body)

    def answer_of(self, call: Call) -> AnswerFormat:
        """Return the format of the answer to ``call``, a chat or a completion in OpenAI's form."""
        kind = self.generates
        return AnswerFormat(
            kind,
            answer_id=answer_id(kind, self.request_id),
            model=call.model,
            created_s=int(time.time()),
            usage_null=call.stream and call.stream_options.include_usage,
        )

    @property
    def generates(self) -> RouteKind:
        """The kind of a chat or completion call. Raises RuntimeError for a passed-through route."""
        if isinstance(self.kind, RouteKind):
            return self.kind
        raise RuntimeError(f"answers of {self.kind.route} are their engines' own")

    def _headers(
        self, fixed: ResponseHeaders, generation: Generation, engines: ResponseHeaders = ()
    ) -> ResponseHeaders:
        if engines:
            passed = passed_headers(tuple(engines))
            names = {name for name, _ in passed}
            fixed = (*(header for header in fixed if header[0] not in names), *passed)
        self.prepare(generation)
        return (*fixed, (b"x-request-id", self.request_id.encode()), *self._routing_headers)


def cancel_with(responder: Responder) -> None:
    """Cancel the running task when its client disconnects, since it may wait for an engine."""
    task = asyncio.current_task()

    def leave(_: Disconnect) -> None:
        if task is not None:
            task.cancel()

    responder.on_disconnect(leave)


USABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
"""The full pattern of a client's request id, which goes into headers, paths and log lines."""


def usable_request_id(requested: str | None) -> RequestId:
    """Return ``requested`` if it is usable, else a new id."""
    if requested is None or USABLE_REQUEST_ID.fullmatch(requested) is None:
        return new_request_id()
    return RequestId(requested)


class RequestIds:
    """Assigns request ids that are unique among running requests."""

    def __init__(self) -> None:
        self._running: set[RequestId] = set()

    def take(self, requested: str | None) -> RequestId:
        """Return ``requested`` if usable, with a suffix if a running request has it, else a new id."""
        request_id = usable_request_id(requested)
        if request_id in self._running:
            request_id = RequestId(f"{request_id}-{new_request_id()[:8]}")
        self._running.add(request_id)
        return request_id

    def release(self, request_id: RequestId) -> None:
        """Release the id of an ended request."""
        self._running.discard(request_id)
