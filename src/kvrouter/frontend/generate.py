"""The two generation routes: from a parsed call to the last byte of its answer."""

import asyncio
import time
from collections.abc import Sequence

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.frontend.errors import JSON_HEADERS, error_body, error_event, error_headers
from kvrouter.frontend.http import SSE_DONE, SSE_FILLER, Disconnect, Disconnected, Request, Responder, Stream
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.openai.answers import Answer, Kind
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall, parse_chat, parse_completion
from kvrouter.frontend.placed import placed_headers, placed_nvext
from kvrouter.frontend.prepare import Hall
from kvrouter.frontend.request_ids import RequestIds
from kvrouter.service.generation import ANSWERED, Generation
from kvrouter.service.router import RouterService
from kvrouter.text.detokenizer import Detokenizer
from kvrouter.text.stops import StopMatcher

EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
CLIENT_LEFT_STATUS = 499


class GenerateRoutes:
    """Handles ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, service: RouterService, hall: Hall, observed: FrontObserved) -> None:
        self._service = service
        self._hall = hall
        self._observed = observed
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
        cancel_with(responder)
        try:
            await self._serve(exchange, request.body)
        except KvrouterError as error:
            exchange.fail(error)
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            exchange.status = CLIENT_LEFT_STATUS
        finally:
            self._ids.give_back(exchange.request_id)
            self._observed.answered(route=request.path, model=exchange.model, status=exchange.status)

    async def _serve(self, exchange: "_Exchange", body: bytes) -> None:
        received_s = time.monotonic()
        parsed: ChatCall | CompletionCall
        parsed = parse_chat(body) if exchange.kind is Kind.CHAT else parse_completion(body)
        call = parsed.call
        text = self._hall.text_of(call)
        exchange.model = call.model
        matcher = StopMatcher(call.stops)
        generate = await self._hall.prepare(parsed, text, exchange.request_id)
        async with self._service.generate(generate, received_s=received_s) as generation:
            reading = _Reading(generation, text.detokenizer(), matcher)
            if call.stream:
                await exchange.stream(call, reading)
            else:
                await exchange.whole(call, reading)


def cancel_with(responder: Responder) -> None:
    """Cancel the running task when its client leaves: nobody else tells it while it waits for an engine."""
    task = asyncio.current_task()

    def leave(_: Disconnect) -> None:
        if task is not None:
            task.cancel()

    responder.on_disconnect(leave)


class _Reading:
    """An engine's chunks as text, up to a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "finish", "generation", "text_of")

    def __init__(self, generation: Generation, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self.generation = generation
        self.finish: FinishReason | None = None
        """Why the answer is complete; None while it is not."""
        self.text_of = detokenizer.push if matcher.is_idle else self._text_until_stop
        """Returns the text that is certain with more tokens; a stop string in it sets ``finish``."""
        self._detokenizer = detokenizer
        self._matcher = matcher

    async def next_text(self) -> str:
        """Read one chunk and return the text that is certain now; the last one sets ``finish``."""
        chunk = await anext(self.generation)
        text = self._text_of(chunk)
        if self.finish is not None:
            self.generation.close(ANSWERED)
        return text

    def _text_until_stop(self, token_ids: Sequence[int]) -> str:
        text, stopped = self._matcher.push(self._detokenizer.push(token_ids))
        if stopped is not None:
            self.finish = FinishReason.STOP
        return text

    def _text_of(self, chunk: EngineChunk) -> str:
        text = self.text_of(chunk.token_ids)
        if self.finish is None and chunk.finish is not None:
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

    __slots__ = ("_responder", "_stream", "kind", "model", "request_id", "status")

    def __init__(self, kind: Kind, responder: Responder, request_id: RequestId) -> None:
        self.kind = kind
        self.model: ModelName | None = None
        self.request_id = request_id
        self.status = KvrouterError.status_hint
        """The status that the call ended with: a mistake of ours until it is answered."""
        self._responder = responder
        self._stream: Stream | None = None

    async def whole(self, call: Call, reading: _Reading) -> None:
        """Answer with one JSON object."""
        texts: list[str] = []
        while reading.finish is None:
            texts.append(await reading.next_text())
        generation = reading.generation
        body = self._answer_of(call).whole(
            "".join(texts),
            reading.finish,
            generation.usage,
            nvext=placed_nvext(generation, call.nvext.extra_fields),
        )
        self.status = 200
        await self._responder.send(200, self._headers(JSON_HEADERS, generation), body)

    async def stream(self, call: Call, reading: _Reading) -> None:
        """Answer with server-sent events; a client that reads slowly holds back its own engine stream.

        Nothing is sent before the first tokens are here, so that what fails until then has a status.
        """
        text = await reading.next_text()
        generation = reading.generation
        stream = self._stream = await self._responder.start_stream(
            200, self._headers(EVENT_HEADERS, generation), filler=SSE_FILLER
        )
        answer = self._answer_of(call)
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
                await stream.wait_ready()
            await generation.hand_over(take)
            if reading.finish is None:
                write(await reading.next_text())
        generation.close(ANSWERED)
        nvext = placed_nvext(generation, call.nvext.extra_fields)
        stream.write(answer.last_event(reading.finish, nvext=nvext))
        if call.stream_options.include_usage:
            stream.write(answer.usage_event(generation.usage))
        stream.write(SSE_DONE)
        stream.end()
        self.status = 200

    def fail(self, error: KvrouterError) -> None:
        """Answer with an error: as a status, or as the last event of a stream that has begun."""
        self.status = error.status_hint
        if self._stream is not None:
            self._stream.write(error_event(error))
            self._stream.end()
            return
        headers = (*error_headers(error), (b"x-request-id", self.request_id.encode()))
        self._responder.answer(error.status_hint, headers, error_body(error))

    def _answer_of(self, call: Call) -> Answer:
        return Answer(
            self.kind,
            request_id=self.request_id,
            model=call.model,
            created_s=int(time.time()),
            usage_null=call.stream and call.stream_options.include_usage,
        )

    def _headers(self, fixed: ResponseHeaders, generation: Generation) -> ResponseHeaders:
        return (*fixed, (b"x-request-id", self.request_id.encode()), *placed_headers(generation))
