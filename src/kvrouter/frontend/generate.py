"""The two generation routes: from a parsed call to the last byte of its answer."""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.frontend.http import SSE_FILLER, Disconnected, Request, Responder, Stream
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.openai.answers import (
    DONE_EVENT,
    Answer,
    Kind,
    error_event,
    error_headers,
    error_json,
)
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall, parse_chat, parse_completion
from kvrouter.frontend.placed import placed_headers, placed_nvext
from kvrouter.frontend.prepare import prepare
from kvrouter.frontend.request_ids import RequestIds
from kvrouter.service.generation import ANSWERED, Generation
from kvrouter.service.router import RouterService
from kvrouter.text.detokenizer import Detokenizer
from kvrouter.text.model import TextModel
from kvrouter.text.stops import StopMatcher

JSON = (b"content-type", b"application/json")
EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class FrontendObserver:
    """What the routes tell telemetry; does nothing by itself."""

    def answered(self, *, route: str, model: str, status: int, streamed: bool) -> None:
        """One call was answered with this status (499: its client left first)."""

    def tokenized(self, *, seconds: float, tokens: int) -> None:
        """One prompt was templated and tokenized."""


class GenerateRoutes:
    """Handles ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        observer: FrontendObserver,
    ) -> None:
        self._service = service
        self._texts = texts
        self._observer = observer
        self._ids = RequestIds()

    async def chat(self, request: Request, responder: Responder) -> None:
        """``POST /v1/chat/completions``."""
        await self._answer(Kind.CHAT, request, responder)

    async def completion(self, request: Request, responder: Responder) -> None:
        """``POST /v1/completions``."""
        await self._answer(Kind.COMPLETION, request, responder)

    async def _answer(self, kind: Kind, request: Request, responder: Responder) -> None:
        """Answer one call; a client that leaves cancels whatever its request waits for."""
        exchange = _Exchange(kind, responder, self._ids.take(request.header("x-request-id")))
        task = asyncio.current_task()
        if task is not None:
            responder.on_disconnect(lambda _: task.cancel())
        try:
            await self._serve(exchange, request.body)
        except KvrouterError as error:
            exchange.fail(error)
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            exchange.status = 499
        finally:
            self._ids.give_back(exchange.request_id)
            self._observer.answered(
                route=request.path, model=exchange.model, status=exchange.status, streamed=exchange.streamed
            )

    async def _serve(self, exchange: "_Exchange", body: bytes) -> None:
        parsed: ChatCall | CompletionCall
        parsed = parse_chat(body) if exchange.kind is Kind.CHAT else parse_completion(body)
        call = parsed.call
        self._service.model(call.model)  # an unknown model is refused before its prompt is tokenized
        exchange.model = call.model
        text = self._texts[call.model]
        matcher = StopMatcher(call.stops)
        began_s = time.perf_counter()
        generate = await prepare(parsed, text, exchange.request_id)
        self._observer.tokenized(seconds=time.perf_counter() - began_s, tokens=len(generate.token_ids))
        async with self._service.generate(generate) as generation:
            first = await anext(generation)
            reading = _Reading(generation, text.detokenizer(), matcher)
            if call.stream:
                await exchange.stream(call, reading, first)
            else:
                await exchange.whole(call, reading, first)


class _Reading:
    """An engine's chunks as text, up to a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "finish", "generation")

    def __init__(self, generation: Generation, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self.generation = generation
        self.finish: FinishReason | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher

    def text_of(self, chunk: EngineChunk) -> str:
        """Return the text that is certain now; sets ``finish`` when the answer is complete."""
        text, stopped = self._matcher.push(self._detokenizer.push(chunk.token_ids))
        if stopped is not None:
            self.finish = FinishReason.STOP
        elif chunk.finish is not None:
            self.finish = chunk.finish
            rest, stopped = self._matcher.push(self._detokenizer.finish())
            text += rest
            if stopped is None:
                text += self._matcher.finish()
            else:
                self.finish = FinishReason.STOP
        return text


class _Exchange:
    """One call's answer on the wire."""

    __slots__ = ("_responder", "_stream", "kind", "model", "request_id", "status", "streamed")

    def __init__(self, kind: Kind, responder: Responder, request_id: RequestId) -> None:
        self.kind = kind
        self.model: str = ""
        self.request_id = request_id
        self.status = 200
        self.streamed = False
        self._responder = responder
        self._stream: Stream | None = None

    async def whole(self, call: Call, reading: _Reading, first: EngineChunk) -> None:
        """Answer with one JSON object."""
        texts = [reading.text_of(first)]
        if reading.finish is None:
            async for chunk in reading.generation:
                texts.append(reading.text_of(chunk))
                if reading.finish is not None:
                    break
        generation = reading.generation
        finish = reading.finish or FinishReason.STOP
        generation.close(ANSWERED)
        answer = self._answer(call)
        body = answer.whole(
            "".join(texts), finish, generation.usage, nvext=placed_nvext(generation, call.nvext.extra_fields)
        )
        await self._responder.send(200, self._headers(JSON, generation=generation), body)

    async def stream(self, call: Call, reading: _Reading, first: EngineChunk) -> None:
        """Answer with server-sent events; a client that reads slowly holds back its own engine stream."""
        self.streamed = True
        generation = reading.generation
        stream = self._stream = await self._responder.start_stream(
            200, self._headers(*EVENTS, generation=generation), filler=SSE_FILLER
        )
        answer = self._answer(call)
        usage_each = call.stream_options.continuous_usage_stats
        stream.write(answer.first_event())
        chunk = first
        while True:
            text = reading.text_of(chunk)
            if text:
                if usage_each:
                    stream.write(answer.text_event_with_usage(text, generation.usage))
                else:
                    stream.write(answer.text_event(text))
            if reading.finish is not None:
                break
            if not stream.ready:
                await stream.wait_ready()
            chunk = await anext(generation)
        generation.close(ANSWERED)
        nvext = placed_nvext(generation, call.nvext.extra_fields)
        stream.write(answer.last_event(reading.finish, nvext=nvext))
        if call.stream_options.include_usage:
            stream.write(answer.usage_event(generation.usage))
        stream.write(DONE_EVENT)
        stream.end()

    def fail(self, error: KvrouterError) -> None:
        """Answer with an error: as a status, or as the last event of a stream that has begun."""
        self.status = error.status_hint
        if self._stream is not None:
            self._stream.write(error_event(error))
            self._stream.end()
            return
        headers = self._headers(JSON, *error_headers(error))
        self._responder.answer(error.status_hint, headers, msgspec.json.encode(error_json(error)))

    def _answer(self, call: Call) -> Answer:
        return Answer(
            self.kind,
            request_id=self.request_id,
            model=call.model,
            created_s=int(time.time()),
            usage_null=call.stream and call.stream_options.include_usage,
        )

    def _headers(self, *more: tuple[bytes, bytes], generation: Generation | None = None) -> ResponseHeaders:
        placed = () if generation is None else placed_headers(generation)
        return (*more, (b"x-request-id", self.request_id.encode()), *placed)
