"""The two generation routes: from a parsed call to the last byte of its answer, and answers from tokens."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from kvrouter.frontend.openai.passed import PASSED_ROUTES, PassedRoute, parse_form, parse_passed
from kvrouter.frontend.openai.passthrough import (
    as_utf8,
    is_surely_unreadable,
    parse_passthrough,
    parse_unread,
)
from kvrouter.frontend.prepare import Bodies, CalledModel, RequestPreparer
from kvrouter.frontend.response_passthrough import pass_events, pass_stream, pass_whole
from kvrouter.frontend.response_writer import (
    RequestIds,
    ResponseWriter,
    cancel_with,
    query_workers,
    routing_nvext,
)
from kvrouter.kernel.routing.request import Decision
from kvrouter.router.generation import ANSWERED, Generation
from kvrouter.router.router_service import RouterService
from kvrouter.router.traffic import NO_ORIGIN, Origin
from kvrouter.text.model import AnswerText, Detokenizer, StopMatcher, TextModel

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestSpans, RequestTracing

SESSION_HEADERS = (b"x-dynamo-session-id", b"x-session-id")
PARENT_HEADERS = (b"x-dynamo-parent-session-id", b"x-parent-session-id")
"""Where a call says of which session it is, and of which that one is a part; of two for one thing the first
wins.
"""

_SESSION_NAMES = frozenset((*SESSION_HEADERS, *PARENT_HEADERS))


class ChunkReader:
    """An engine's chunks as text, up to a stop string."""

    __slots__ = ("_answer_text", "finish", "generation", "text_of")

    def __init__(self, generation: Generation, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self.generation = generation
        self.finish: FinishReason | None = None
        """Why the answer is complete; None while it is not."""
        self._answer_text = AnswerText(detokenizer, matcher)
        self.text_of = detokenizer.push if matcher.is_idle else self._text_until_stop
        """Returns the text that is certain with more tokens; a stop string in it sets ``finish``."""

    async def next_text(self) -> str:
        """Read one chunk and return the text that is certain now; the last one sets ``finish``."""
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
    exchange: ResponseWriter, call: Call, request: GenerateRequest, decision: Decision
) -> None:
    """Answer a call that only asked where it would go: no text, and an ``nvext`` with workers and tokens."""
    nvext = {"worker_id": query_workers(decision), "token_ids": list(request.token_ids)}
    answer, usage = exchange.answer_of(call), Usage(request.isl_tokens, 0)
    if call.stream:
        body = answer.first_event() + answer.last_event(FinishReason.STOP, nvext=nvext)
        if call.stream_options.include_usage:
            body += answer.usage_event(usage)
        body += SSE_DONE
    else:
        body = answer.whole("", FinishReason.STOP, usage, nvext=nvext)
    await exchange.send_query(call, body)


async def answer_whole(exchange: ResponseWriter, call: Call, reading: ChunkReader) -> None:
    """Answer with one JSON object."""
    texts: list[str] = []
    while reading.finish is None:
        texts.append(await reading.next_text())
    generation = reading.generation
    body = exchange.answer_of(call).whole(
        "".join(texts),
        reading.finish,
        generation.usage,
        nvext=routing_nvext(generation, call.nvext.extra_fields),
    )
    await exchange.send(generation, body)


async def answer_stream(exchange: ResponseWriter, call: Call, reading: ChunkReader) -> None:
    """Answer with server-sent events; a client that reads slowly holds back its own engine stream."""
    text = await reading.next_text()
    generation = reading.generation
    stream = exchange.begin_stream(generation)
    answer = exchange.answer_of(call)
    usage_each = call.stream_options.continuous_usage_stats

    put, event_of, text_of = stream.write, answer.text_event, reading.text_of

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
        return stream.ready and reading.finish is None

    stream.write(answer.first_event())
    write(text)
    while reading.finish is None:
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        await generation.hand_over(take)
        if reading.finish is None:
            write(await reading.next_text())
    generation.close(ANSWERED)
    nvext = routing_nvext(generation, call.nvext.extra_fields)
    stream.write(answer.last_event(reading.finish, nvext=nvext))
    if call.stream_options.include_usage:
        stream.write(answer.usage_event(generation.usage))
    stream.write(SSE_DONE)
    exchange.end_stream(stream)


CLIENT_LEFT_STATUS = 499

_PARSERS: Mapping[RouteKind, Callable[..., ChatCall | CompletionCall]] = {
    RouteKind.CHAT: parse_chat,
    RouteKind.COMPLETION: parse_completion,
}
_ROUTES = {RouteKind.CHAT: CallRoute.CHAT, RouteKind.COMPLETION: CallRoute.COMPLETION}


class GenerateRoutes:
    """Handles ``/v1/chat/completions``, ``/v1/completions`` and the routes whose calls pass as they are."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        bodies: Bodies,
        observed: FrontendInstrumentation,
        tracing: "RequestTracing | None" = None,
        *,
        keep_alive_s: float = 0.0,
    ) -> None:
        self._tracing = tracing
        self._keep_alive_s = keep_alive_s
        self._service = service
        self._preparer = preparer
        self._bodies = bodies
        self._observed = observed
        self._ids = RequestIds()

    async def chat(self, request: Request, responder: Responder) -> None:
        """``POST /v1/chat/completions``."""
        await self._answer(RouteKind.CHAT, request, responder)

    async def completion(self, request: Request, responder: Responder) -> None:
        """``POST /v1/completions``."""
        await self._answer(RouteKind.COMPLETION, request, responder)

    def passed(self) -> dict[str, Handler]:
        """What handles the calls that pass as they are, by path."""
        return {route.route.value: partial(self._answer, route) for route in PASSED_ROUTES}

    async def _answer(self, kind: RouteKind | PassedRoute, request: Request, responder: Responder) -> None:
        """Answer one call; a client that leaves cancels whatever its request waits for."""
        began_s = time.monotonic()
        trace = trace_of(request.headers)
        spans = None
        if self._tracing is not None:
            spans = self._tracing.begin(request, trace)
            trace = spans.trace
        exchange = ResponseWriter(kind, responder, self._ids.take(request.header("x-request-id")))
        cancel_with(responder)
        try:
            client = 0 if responder.client is None else hash(responder.client[0])
            await self._serve(exchange, request, trace, spans, client)
        except KvrouterError as error:
            self._observed.failed(error, model=exchange.model)
            exchange.fail(error)
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            exchange.status = CLIENT_LEFT_STATUS
        finally:
            exchange.close()
            self._ids.give_back(exchange.request_id)
            self._observed.answered(
                route=request.path,
                model=exchange.model,
                status=exchange.status,
                request_id=exchange.request_id,
                trace=trace,
                duration_s=time.monotonic() - began_s,
                code=None if exchange.error is None else exchange.error.code,
                generation=exchange.generation,
            )
            if spans is not None:
                spans.end(
                    status=exchange.status,
                    model=exchange.model,
                    request_id=exchange.request_id,
                    error=exchange.error,
                    generation=exchange.generation,
                )

    async def _serve(
        self,
        exchange: ResponseWriter,
        request: Request,
        trace: TraceContext,
        spans: "RequestSpans | None",
        client: int,
    ) -> None:
        """``client`` distinguishes who asks from others, by its address."""
        received_s = time.monotonic()
        requests = self._service.requests
        origin = NO_ORIGIN if requests.traffic is None else origin_of(request.path, request.headers)
        with self._refusals_recorded(exchange, request.path, received_s):
            call, generate, text, matcher = await self._prepared(exchange, request)
        request.read()
        if spans is not None:
            spans.prepared()
        generate = replace(generate, trace=trace, client=client)
        if call.nvext.asks_only:
            decision = self._service.model(generate.model).explain(generate)
            await answer_query(exchange, call, generate, decision)
            return
        with self._refusals_recorded(exchange, request.path, received_s):
            running = requests.generate(generate, received_s=received_s, origin=origin, spans=spans)
        exchange.generation = running
        if call.stream and self._keep_alive_s:
            exchange.keep_alive(running, self._keep_alive_s)
        async with running as generation:
            if matcher is None or text is None:
                if call.stream and isinstance(exchange.kind, PassedRoute):
                    await pass_events(exchange, generation)
                elif call.stream:
                    await pass_stream(exchange, call, generation, text)
                else:
                    await pass_whole(exchange, call, generation)
                return
            reading = ChunkReader(generation, text.detokenizer(), matcher)
            if call.stream:
                await answer_stream(exchange, call, reading)
            else:
                await answer_whole(exchange, call, reading)

    @contextmanager
    def _refusals_recorded(self, exchange: ResponseWriter, route: str, received_s: float) -> Iterator[None]:
        """Record, where that is asked for, what is refused before it is a request."""
        try:
            yield
        except KvrouterError as error:
            if self._service.requests.traffic is not None:
                self._service.requests.traffic.call_refused(
                    error, route=route, model=exchange.model, received_s=received_s
                )
            raise

    async def _prepared(self, exchange: ResponseWriter, request: Request) -> "_Prepared":
        """Return the call, without its body: what is not needed of that ends here, and not with the answer.

        Engines that take calls as clients write them get the body itself, again when one fails.
        """
        kind = exchange.kind
        reader = self._preparer.nvext_reader(request.headers)
        if isinstance(kind, PassedRoute) and kind.is_form:
            return await self._prepared_form(exchange, kind, request, reader)
        data = request.take_body()
        try:
            body = await self._scanned(data, kind.read_fields if isinstance(kind, PassedRoute) else None)
        except NotJson as error:
            return await self._prepared_unread(exchange, data, error, reader)
        if isinstance(kind, PassedRoute):
            return await self._prepared_passed(exchange, kind, body, reader)
        called = self._preparer.called_model(body)
        exchange.model = called.name
        if called.router.fleet.takes_calls:
            text = self._preparer.passthrough_text(called.name)
            parse = partial(parse_passthrough, _ROUTES[kind], called.name, reader=reader)
            passed = await self._bodies.parse(body, parse)
            generate = await self._preparer.prepare_passthrough(passed, called, text, exchange.request_id)
            return _Prepared(passed.call, generate, text)
        text = self._preparer.text_of(called, body)
        parsed = await self._bodies.parse(body, partial(_PARSERS[kind], nvext=reader, model=called.name))
        matcher = StopMatcher(parsed.call.stops)
        generate = await self._preparer.prepare(parsed, called, text, exchange.request_id)
        return _Prepared(parsed.call, generate, text, matcher)

    async def _scanned(self, data: bytes, read_fields: frozenset[str] | None) -> ScannedBody:
        """Look through a body as engines read it, with Python's own decoder: it may be in UTF-16 or UTF-32,
        and where its engine takes calls numbers need not be finite. Raises :class:`InvalidRequest`.
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
        self, exchange: ResponseWriter, data: bytes, error: NotJson, reader: NvextReader
    ) -> "_Prepared":
        """Return a call whose body is no JSON object: the engine of the only model says what is wrong with
        it. Raises ``error`` where no engine is to be asked.
        """
        try:
            called = self._preparer.only_model()
        except KvrouterError:
            raise error from None
        if not called.router.fleet.takes_calls or not is_surely_unreadable(data):
            raise error
        exchange.model, kind = called.name, exchange.kind
        route = kind.route if isinstance(kind, PassedRoute) else _ROUTES[kind]
        text = self._preparer.passthrough_text(called.name)
        passed = parse_unread(route, called.name, data, reader)
        generate = await self._preparer.prepare_passthrough(passed, called, text, exchange.request_id)
        return _Prepared(passed.call, replace(generate, whole=True), text)

    async def _prepared_passed(
        self, exchange: ResponseWriter, route: PassedRoute, body: ScannedBody, reader: NvextReader
    ) -> "_Prepared":
        """Return a call of another route; one worker serves it, because nobody here knows its parts."""
        called = self._preparer.called_model(body)
        exchange.model = called.name
        _check_takes_calls(route, called)
        text = self._preparer.passthrough_text(called.name)
        passed = await self._bodies.parse(body, partial(parse_passed, route, called.name, reader=reader))
        generate = await self._preparer.prepare_passthrough(passed, called, text, exchange.request_id)
        return _Prepared(passed.call, replace(generate, whole=True), text)

    async def _prepared_form(
        self, exchange: ResponseWriter, route: PassedRoute, request: Request, reader: NvextReader
    ) -> "_Prepared":
        """The same of a call that is a form."""
        form = await self._bodies.form(request.header("content-type") or "", request.take_body())
        called = self._preparer.called_model_of(form)
        exchange.model = called.name
        _check_takes_calls(route, called)
        text = self._preparer.passthrough_text(called.name)
        passed = parse_form(route, called.name, form, reader)
        generate = await self._preparer.prepare_passthrough(passed, called, text, exchange.request_id)
        return _Prepared(passed.call, replace(generate, whole=True), text)


def _check_takes_calls(route: PassedRoute, called: CalledModel) -> None:
    """Raise :class:`RouteNotServed` for a model whose engines get tokens."""
    if len(called.router.fleet) and not called.router.fleet.takes_calls:
        raise RouteNotServed(
            f"{route.route}: the engines of {called.name!r} get tokens, and no calls as they are "
            "written: they serve /v1/chat/completions and /v1/completions alone"
        )


class _Prepared(NamedTuple):
    """A call to be served; ``matcher`` None: its engine writes the answer."""

    call: Call
    generate: GenerateRequest
    text: TextModel | None
    matcher: StopMatcher | None = None


def origin_of(route: str, headers: Iterable[tuple[bytes, bytes]]) -> Origin:
    """Return a call's route and the sessions that its headers name, for a recording: how it is served does
    not depend on them.
    """
    sent = {name: value.decode("latin-1").strip() for name, value in headers if name in _SESSION_NAMES}
    if not sent:
        return Origin(route)
    return Origin(route, _first(sent, SESSION_HEADERS), _first(sent, PARENT_HEADERS))


TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
"""A ``traceparent`` of W3C's version 0, or a later one that may go on behind it."""

_PLAIN_HEADER = re.compile(rb"[\t -~]*")

TRACE_VALUE_MAX_BYTES = 8192
"""Longer values are not forwarded: what W3C asks of those who forward baggage, and of ``tracestate`` less."""

_TRACE_NAMES = frozenset((b"traceparent", b"tracestate", b"baggage"))


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Return the trace that a call belongs to. As W3C wants it, a ``traceparent`` that is invalid or there
    twice begins no trace, and other headers of one name are joined.
    """
    sent: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _TRACE_NAMES:
            sent.setdefault(name, []).append(value.strip(b" \t"))
    if not sent:
        return NO_TRACE
    parents = sent.get(b"traceparent", [])
    is_one = len(parents) == 1 and len(parents[0]) <= TRACE_VALUE_MAX_BYTES
    traceparent = parents[0] if is_one else b""
    if TRACEPARENT.fullmatch(traceparent) is None or (traceparent[:2] == b"00" and len(traceparent) != 55):
        return TraceContext(baggage=_forwarded(sent.get(b"baggage", ())))
    return TraceContext(
        traceparent=traceparent.decode(),
        tracestate=_forwarded(sent.get(b"tracestate", ())),
        baggage=_forwarded(sent.get(b"baggage", ())),
        trace_id=traceparent[3:35].decode(),
    )


def _forwarded(values: Iterable[bytes]) -> str:
    """The header's value for an engine; empty where none could be sent there."""
    value = b",".join(filter(None, values))
    if len(value) > TRACE_VALUE_MAX_BYTES or _PLAIN_HEADER.fullmatch(value) is None:
        return ""
    return value.decode()


def _first(sent: dict[bytes, str], names: Iterable[bytes]) -> str | None:
    return next((sent[name] for name in names if sent.get(name)), None)
