"""Answers written here from an engine's tokens."""

from collections.abc import Sequence

from kvrouter.core.requests import FinishReason, GenerateRequest, Usage
from kvrouter.frontend.http import SSE_DONE
from kvrouter.frontend.openai.parse import Call
from kvrouter.frontend.response_writer import ResponseWriter, placed_nvext, query_workers
from kvrouter.routing.request import Decision
from kvrouter.service.request_run import ANSWERED, Generation
from kvrouter.text.detokenizer import AnswerText, Detokenizer, StopMatcher


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
    answer, usage = exchange.answer_of(call), Usage(len(request.token_ids), 0)
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
        nvext=placed_nvext(generation, call.nvext.extra_fields),
    )
    await exchange.send(generation, body)


async def answer_stream(exchange: ResponseWriter, call: Call, reading: ChunkReader) -> None:
    """Answer with server-sent events; a client that reads slowly holds back its own engine stream."""
    text = await reading.next_text()
    generation = reading.generation
    stream = await exchange.begin_stream(generation)
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
    exchange.end_stream(stream)
