"""Handlers of the generation routes, from a request to the last byte of its answer."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import (
    NO_TRACE,
    CallRoute,
    FinishReason,
    GenerateRequest,
    TraceContext,
    Usage,
)
from kvrouter.frontend.errors import RouteNotServed
from kvrouter.frontend.http import SSE_DONE, Disconnected, Handler, Request, Responder
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.answers import RouteKind
from kvrouter.frontend.openai.body import NotFinite, NotJson, ScannedBody
from kvrouter.frontend.openai.parse import (
    Call,
    ChatCall,
    CompletionCall,
    NvextReader,
    parse_chat,
    parse_completion,
)
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES, PassedRoute, parse_form, parse_passed
from kvrouter.frontend.openai.passthrough import (
    as_utf8,
    is_surely_unreadable,
    parse_passthrough,
    parse_unread,
)
from kvrouter.frontend.prepare import Bodies, CalledModel, RequestPreparer
from kvrouter.frontend.response_passthrough import pass_body, pass_events, pass_stream
from kvrouter.frontend.response_writer import (
    RequestIds,
    ResponseWriter,
    cancel_with,
    query_workers,
    routing_nvext,
)
from kvrouter.kernel.routing.interface import Decision
from kvrouter.router.generation import ANSWERED, Generation
from kvrouter.router.router_service import RouterService
from kvrouter.router.traffic import NO_ORIGIN, Origin
from kvrouter.text.model import AnswerText, Detokenizer, StopMatcher, TextModel

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestSpans, RequestTracing

SESSION_HEADERS = (b"x-dynamo-session-id", b"x-session-id")
PARENT_HEADERS = (b"x-dynamo-parent-session-id", b"x-parent-session-id")
"""Headers with a call's session, and with the parent of its session; the first one present wins."""

_SESSION_NAMES = frozenset((*SESSION_HEADERS, *PARENT_HEADERS))


class ChunkReader:
    """Reads an engine's chunks as text, up to a stop string."""

    __slots__ = ("_answer_text", "finish", "generation", "text_of")

    def __init__(self, generation: Generation, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self.generation = generation
        self.finish: FinishReason | None = None
        """The finish reason; None until the answer is complete."""
        self._answer_text = AnswerText(detokenizer, matcher)
        self.text_of = detokenizer.push if matcher.is_idle else self._text_until_stop
        """Adds tokens and returns the text that is now certain; a stop string in it sets ``finish``."""

    async def next_text(self) -> str:
        """Read one chunk and return the text that is now certain; the last chunk sets ``finish``."""
        chunk = await anext(self.generation)
        text = self.text_of(chunk.token_ids)
        if self.finish is None and chunk.finish is not None:
            text += self._answer_text.finish()
            self.finish = FinishReason.STOP if self._answer_text.stopped else chunk.finish
        if self.finish is not None:
            self.generation.close(ANSWERED)
        return text

    def _text_until_stop(self, token_ids: Sequence[int]) -> str:
        text = self._answer_text.push(token_ids)
        if self._answer_text.stopped:
            self.finish = FinishReason.STOP
        return text


async def answer_query(
    writer: ResponseWriter, call: Call, request: GenerateRequest, decision: Decision
) -> None:
    """Answer a routing query: no text, and an ``nvext`` with the workers and the prompt's tokens."""
    nvext = {"worker_id": query_workers(decision), "token_ids": list(request.token_ids)}
    answer, usage = writer.answer_of(call), Usage(request.isl_tokens, 0)
    if call.stream:
        body = answer.first_event() + answer.last_event(FinishReason.STOP, nvext=nvext)
        if call.stream_options.include_usage:
            body += answer.usage_event(usage)
        body += SSE_DONE
    else:
        body = answer.json_body("", FinishReason.STOP, usage, nvext=nvext)
    await writer.send_query(call, body)


async def answer_json(writer: ResponseWriter, call: Call, reader: ChunkReader) -> None:
    """Answer with one JSON object."""
    texts: list[str] = []
    while reader.finish is None:
        texts.append(await reader.next_text())
    generation = reader.generation
    body = writer.answer_of(call).json_body(
        "".join(texts),
        reader.finish,
        generation.usage,
        nvext=routing_nvext(generation, call.nvext.extra_fields),
    )
    await writer.send(generation, body)


async def answer_stream(writer: ResponseWriter, call: Call, reader: ChunkReader) -> None:
    """Answer with server-sent events; a slow client slows its own engine stream down."""
    generation = reader.generation
    answer = writer.answer_of(call)
    first_event = answer.first_event()
    writer.prepare(generation)
    text = await reader.next_text()
    stream = writer.begin_stream(generation)
    usage_each = call.stream_options.continuous_usage_stats

    put, event_of, text_of = stream.write, answer.text_event, reader.text_of

    def write(text: str) -> None:
        if not text:
            return
        put(answer.text_event_with_usage(text, generation.usage) if usage_each else event_of(text))

    def take(token_ids: Sequence[int]) -> bool:
        text = text_of(token_ids)
        if text:
            if usage_each:
                write(text)
            else:
                put(event_of(text))
        return stream.ready and reader.finish is None

    stream.write(first_event)
    write(text)
    writer.flush()
    while reader.finish is None:
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        await generation.hand_over(take)
        if reader.finish is None:
            write(await reader.next_text())
    generation.close(ANSWERED)
    nvext = routing_nvext(generation, call.nvext.extra_fields)
    stream.write(answer.last_event(reader.finish, nvext=nvext))
    if call.stream_options.include_usage:
        stream.write(answer.usage_event(generation.usage))
    stream.write(SSE_DONE)
    writer.end_stream(stream)


CLIENT_LEFT_STATUS = 499

_PARSERS: Mapping[RouteKind, Callable[..., ChatCall | CompletionCall]] = {
    RouteKind.CHAT: parse_chat,
    RouteKind.COMPLETION: parse_completion,
}
_ROUTES = {RouteKind.CHAT: CallRoute.CHAT, RouteKind.COMPLETION: CallRoute.COMPLETION}


class GenerateRoutes:
    """Handles ``/v1/chat/completions``, ``/v1/completions`` and the passed-through routes."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        bodies: Bodies,
        instrumentation: FrontendInstrumentation,
        tracing: "RequestTracing | None" = None,
        *,
        keep_alive_s: float = 0.0,
    ) -> None:
        self._tracing = tracing
        self._keep_alive_s = keep_alive_s
        self._service = service
        self._preparer = preparer
        self._bodies = bodies
        self._instrumentation = instrumentation
        self._ids = RequestIds()

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of all routes, by path."""
        kinds: dict[CallRoute, RouteKind | PassedRoute] = {route: kind for kind, route in _ROUTES.items()}
        kinds |= {route.route: route for route in PASSED_ROUTES}
        return {route.value: partial(self._answer, kind) for route, kind in kinds.items()}

    async def _answer(self, kind: RouteKind | PassedRoute, request: Request, responder: Responder) -> None:
        """Answer one call; it is cancelled when its client disconnects."""
        began_s = time.monotonic()
        trace = trace_of(request.headers)
        spans = None
        if self._tracing is not None:
            spans = self._tracing.begin(request, trace)
            trace = spans.trace
        writer = ResponseWriter(kind, responder, self._ids.take(request.header("x-request-id")))
        cancel_with(responder)
        try:
            client = 0 if responder.client is None else hash(responder.client[0])
            await self._serve(writer, request, trace, spans, client)
        except KvrouterError as error:
            self._instrumentation.failed(error, model=writer.model)
            writer.fail(error)
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            writer.status = CLIENT_LEFT_STATUS
        finally:
            writer.close()
            self._ids.release(writer.request_id)
            self._instrumentation.answered(
                route=request.path,
                model=writer.model,
                status=writer.status,
                request_id=writer.request_id,
                trace=trace,
                duration_s=time.monotonic() - began_s,
                code=None if writer.error is None else writer.error.code,
                generation=writer.generation,
            )
            if spans is not None:
                spans.end(
                    status=writer.status,
                    model=writer.model,
                    request_id=writer.request_id,
                    error=writer.error,
                    generation=writer.generation,
                )

    async def _serve(
        self,
        writer: ResponseWriter,
        request: Request,
        trace: TraceContext,
        spans: "RequestSpans | None",
        client: int,
    ) -> None:
        """Parse and route the call, and write its answer. ``client`` is a hash of the client's address."""
        received_s = time.monotonic()
        requests = self._service.requests
        origin = NO_ORIGIN if requests.traffic is None else origin_of(request.path, request.headers)
        try:
            call, generate_request, text, matcher = await self._prepared(writer, request)
        except KvrouterError as error:
            self._record_refusal(error, writer, request, received_s)
            raise
        request.read()
        if spans is not None:
            spans.prepared()
        generate_request = replace(generate_request, trace=trace, client=client)
        if call.nvext.is_query:
            decision = self._service.model(generate_request.model).explain(generate_request)
            await answer_query(writer, call, generate_request, decision)
            return
        try:
            running = requests.generate(generate_request, received_s=received_s, origin=origin, spans=spans)
        except KvrouterError as error:
            self._record_refusal(error, writer, request, received_s)
            raise
        writer.generation = running
        if call.stream and self._keep_alive_s:
            writer.keep_alive(running, self._keep_alive_s)
        async with running as generation:
            if matcher is None or text is None:
                if call.stream and isinstance(writer.kind, PassedRoute):
                    await pass_events(writer, generation)
                elif call.stream:
                    await pass_stream(writer, call, generation, text)
                else:
                    await pass_body(writer, call, generation)
                return
            await generation.begin()
            reader = ChunkReader(generation, text.detokenizer(), matcher)  # made while the engine works
            if call.stream:
                await answer_stream(writer, call, reader)
            else:
                await answer_json(writer, call, reader)

    def _record_refusal(
        self, error: KvrouterError, writer: ResponseWriter, request: Request, received_s: float
    ) -> None:
        """Record a call that is refused before it becomes a request, if a recording runs."""
        traffic = self._service.requests.traffic
        if traffic is not None:
            traffic.call_refused(error, route=request.path, model=writer.model, received_s=received_s)

    async def _prepared(self, writer: ResponseWriter, request: Request) -> "_Prepared":
        """Return the parsed call. The body is released here, not at the end of the answer, except for engines
        that take calls: they get the body itself, again after a failure.
        """
        kind = writer.kind
        reader = self._preparer.nvext_reader(request.headers)
        if isinstance(kind, PassedRoute) and kind.is_form:
            return await self._prepared_form(writer, kind, request, reader)
        data = request.take_body()
        try:
            body = await self._scanned(data, kind.read_fields if isinstance(kind, PassedRoute) else None)
        except NotJson as error:
            return await self._prepared_unread(writer, data, error, reader)
        if isinstance(kind, PassedRoute):
            return await self._prepared_passed(writer, kind, body, reader)
        called = self._preparer.called_model(body)
        writer.model = called.name
        if called.router.fleet.takes_calls:
            text = self._preparer.passthrough_text(called.name)
            parse = partial(parse_passthrough, _ROUTES[kind], called.name, reader=reader)
            passthrough = await self._bodies.parse(body, parse)
            generate_request = await self._preparer.prepare_passthrough(
                passthrough, called, text, writer.request_id
            )
            return _Prepared(passthrough.call, generate_request, text)
        text = self._preparer.text_of(called, body)
        parsed = await self._bodies.parse(body, partial(_PARSERS[kind], nvext=reader, model=called.name))
        matcher = StopMatcher(parsed.call.stops)
        generate_request = await self._preparer.prepare(parsed, called, text, writer.request_id)
        return _Prepared(parsed.call, generate_request, text, matcher)

    async def _scanned(self, data: bytes, read_fields: frozenset[str] | None) -> ScannedBody:
        """Scan a body as leniently as engines, which use Python's JSON decoder: it may be UTF-16 or UTF-32,
        and for engines that take calls numbers may be NaN or infinite. Raises :class:`InvalidRequest`.
        """
        try:
            return await self._bodies.scan(data, read_fields)
        except NotFinite:
            body = await self._bodies.scan(data, read_fields, takes_nan=True)
            if not self._preparer.called_model(body).router.fleet.takes_calls:
                raise
            return body
        except NotJson:
            written = as_utf8(data)
            if written is None:
                raise
        return await self._scanned(written, read_fields)

    async def _prepared_unread(
        self, writer: ResponseWriter, data: bytes, error: NotJson, reader: NvextReader
    ) -> "_Prepared":
        """Return a call whose body is no JSON object: the engine of the only model answers what is wrong.
        Raises ``error`` when no engine may get it.
        """
        try:
            called = self._preparer.only_model()
        except KvrouterError:
            raise error from None
        if not called.router.fleet.takes_calls or not is_surely_unreadable(data):
            raise error
        writer.model, kind = called.name, writer.kind
        route = kind.route if isinstance(kind, PassedRoute) else _ROUTES[kind]
        text = self._preparer.passthrough_text(called.name)
        passthrough = parse_unread(route, called.name, data, reader)
        generate_request = await self._preparer.prepare_passthrough(
            passthrough, called, text, writer.request_id
        )
        return _Prepared(passthrough.call, replace(generate_request, aggregated=True), text)

    async def _prepared_passed(
        self, writer: ResponseWriter, route: PassedRoute, body: ScannedBody, reader: NvextReader
    ) -> "_Prepared":
        """Return a call of a passed-through route; one worker serves it: the router cannot split it."""
        called = self._preparer.called_model(body)
        writer.model = called.name
        _check_takes_calls(route, called)
        text = self._preparer.passthrough_text(called.name)
        passthrough = await self._bodies.parse(body, partial(parse_passed, route, called.name, reader=reader))
        generate_request = await self._preparer.prepare_passthrough(
            passthrough, called, text, writer.request_id
        )
        return _Prepared(passthrough.call, replace(generate_request, aggregated=True), text)

    async def _prepared_form(
        self, writer: ResponseWriter, route: PassedRoute, request: Request, reader: NvextReader
    ) -> "_Prepared":
        """Return a call of a passed-through route whose body is a form."""
        form = await self._bodies.form(request.header("content-type") or "", request.take_body())
        called = self._preparer.called_model_of(form)
        writer.model = called.name
        _check_takes_calls(route, called)
        text = self._preparer.passthrough_text(called.name)
        passthrough = parse_form(route, called.name, form, reader)
        generate_request = await self._preparer.prepare_passthrough(
            passthrough, called, text, writer.request_id
        )
        return _Prepared(passthrough.call, replace(generate_request, aggregated=True), text)


def _check_takes_calls(route: PassedRoute, called: CalledModel) -> None:
    """Raise :class:`RouteNotServed` for a model whose engines take tokens."""
    if len(called.router.fleet) and not called.router.fleet.takes_calls:
        raise RouteNotServed(
            f"{route.route}: the engines of {called.name!r} get tokens, and no calls as they are "
            "written: they serve /v1/chat/completions and /v1/completions alone"
        )


class _Prepared(NamedTuple):
    """A parsed call; ``matcher`` is None when its engine writes the answer."""

    call: Call
    generate_request: GenerateRequest
    text: TextModel | None
    matcher: StopMatcher | None = None


def origin_of(route: str, headers: Iterable[tuple[bytes, bytes]]) -> Origin:
    """Return a call's route and the sessions that its headers name, for recordings; routing ignores them."""
    sent = {name: value.decode("latin-1").strip() for name, value in headers if name in _SESSION_NAMES}
    if not sent:
        return Origin(route)
    return Origin(route, _first(sent, SESSION_HEADERS), _first(sent, PARENT_HEADERS))


TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
"""A ``traceparent`` of W3C's version 0, or of a later version, which may have further fields."""

_PLAIN_HEADER = re.compile(rb"[\t -~]*")

TRACE_VALUE_MAX_BYTES = 8192
"""Longer values are not forwarded; W3C requires this much for ``baggage``, less for ``tracestate``."""

_TRACE_NAMES = frozenset((b"traceparent", b"tracestate", b"baggage"))


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Return the trace context of a call. As W3C specifies, an invalid or repeated ``traceparent`` is
    ignored, and other repeated headers are joined.
    """
    sent: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _TRACE_NAMES:
            sent.setdefault(name, []).append(value.strip(b" \t"))
    if not sent:
        return NO_TRACE
    parents = sent.get(b"traceparent", [])
    is_usable = len(parents) == 1 and len(parents[0]) <= TRACE_VALUE_MAX_BYTES
    traceparent = parents[0] if is_usable else b""
    if TRACEPARENT.fullmatch(traceparent) is None or (traceparent[:2] == b"00" and len(traceparent) != 55):
        return TraceContext(baggage=_forwarded(sent.get(b"baggage", ())))
    return TraceContext(
        traceparent=traceparent.decode(),
        tracestate=_forwarded(sent.get(b"tracestate", ())),
        baggage=_forwarded(sent.get(b"baggage", ())),
        trace_id=traceparent[3:35].decode(),
    )


def _forwarded(values: Iterable[bytes]) -> str:
    """Return the header's value for an engine; empty when it cannot be sent."""
    value = b",".join(filter(None, values))
    if len(value) > TRACE_VALUE_MAX_BYTES or _PLAIN_HEADER.fullmatch(value) is None:
        return ""
    return value.decode()


def _first(sent: dict[bytes, str], names: Iterable[bytes]) -> str | None:
    return next((sent[name] for name in names if sent.get(name)), None)
