"""Answers that an engine wrote: its bytes go to the client as they are.

When the engine is lost in mid-answer another one goes on from the tokens, and the rest is written here, in
the same form and under the same id.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvrouter.core.errors import InternalError
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.frontend.exchange import Exchange
from kvrouter.frontend.http import SSE_DONE, Stream, sse_event
from kvrouter.frontend.openai.answers import Answer, Kind
from kvrouter.frontend.openai.parse import Call
from kvrouter.frontend.placed import placed_nvext
from kvrouter.service.generation import ANSWERED, Generation
from kvrouter.text.answer_text import AnswerText
from kvrouter.text.model import TextModel
from kvrouter.text.stops import StopMatcher


async def pass_whole(exchange: Exchange, call: Call, generation: Generation) -> None:
    """Answer with the engine's JSON object."""
    pieces: list[bytes] = []
    async for chunk in generation:
        pieces.append(chunk.raw)
        if chunk.finish is not None:
            break
    body = b"".join(pieces)
    if not body:
        raise _not_their_own()
    nvext = placed_nvext(generation, call.nvext.extra_fields)
    if nvext and body.rstrip().endswith(b"}"):
        body = body.rstrip()[:-1] + b"," + msgspec.json.encode({"nvext": nvext})[1:]
    await exchange.send(generation, body)


async def pass_stream(exchange: Exchange, call: Call, generation: Generation, text: TextModel) -> None:
    """Answer with the engine's events; a client that reads slowly holds back its own engine stream."""
    chunk = await anext(generation)
    stream = await exchange.begin_stream(generation)
    passing = _Passing(exchange.kind, call, generation, text, stream)
    while True:
        if passing.pass_on(chunk):
            break
        if not stream.ready:
            await stream.wait_ready()
        chunk = await anext(generation)
    generation.close(ANSWERED)
    exchange.end_stream(stream)


class _Passing:
    """One stream, and what is kept of it in case that somebody else must go on."""

    def __init__(
        self, kind: Kind, call: Call, generation: Generation, text: TextModel, stream: Stream
    ) -> None:
        self._kind = kind
        self._call = call
        self._generation = generation
        self._text = text
        self._stream = stream
        self._first_raw = b""
        self._text_chars = 0
        self._rest: _Rest | None = None

    def pass_on(self, chunk: EngineChunk) -> bool:
        """Send what ``chunk`` brings; return whether the answer is complete."""
        if chunk.raw:
            self._first_raw = self._first_raw or chunk.raw
            self._text_chars += chunk.text_chars or 0
            self._stream.write(chunk.raw if chunk.finish is None else self._with_nvext(chunk.raw))
            return chunk.finish is not None
        if not chunk.token_ids and chunk.finish is None:
            return False
        if self._rest is None:
            self._rest = self._go_on(chunk)
        finish = self._rest.push(chunk.token_ids, chunk.finish)
        if finish is None:
            return False
        self._end(self._rest.answer, finish)
        return True

    def _go_on(self, chunk: EngineChunk) -> "_Rest":
        if not self._first_raw:
            raise _not_their_own()
        generated = self._generation.generated
        before = generated[: len(generated) - len(chunk.token_ids)]
        return _Rest(
            _answer_like(self._first_raw, self._kind, self._call),
            self._stream,
            self._text,
            self._call.stops,
            before=before,
            sent_chars=self._text_chars,
        )

    def _end(self, answer: Answer, finish: FinishReason) -> None:
        write = self._stream.write
        write(answer.last_event(finish, nvext=self._nvext()))
        if self._call.stream_options.include_usage:
            write(answer.usage_event(self._generation.usage))
        write(SSE_DONE)

    def _with_nvext(self, raw: bytes) -> bytes:
        nvext = self._nvext()
        if not nvext:
            return raw
        event = sse_event(msgspec.json.encode({"choices": [], "nvext": nvext}))
        return raw.removesuffix(SSE_DONE) + event + SSE_DONE

    def _nvext(self) -> Mapping[str, object] | None:
        return placed_nvext(self._generation, self._call.nvext.extra_fields)


class _Rest:
    """The rest of an answer that another engine began, from its tokens."""

    def __init__(
        self,
        answer: Answer,
        stream: Stream,
        text: TextModel,
        stops: Sequence[str],
        *,
        before: Sequence[int],
        sent_chars: int,
    ) -> None:
        self.answer = answer
        self._stream = stream
        self._answer_text = AnswerText(text.detokenizer(), StopMatcher(stops))
        self._known_chars = sent_chars
        """How many characters of what is generated the client has already."""
        self._write(self._answer_text.push(before))

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> FinishReason | None:
        """More tokens, and perhaps the end; return why the answer is complete, None while it is not."""
        answer_text = self._answer_text
        if not answer_text.stopped:
            self._write(answer_text.push(token_ids))
        if finish is not None and not answer_text.stopped:
            self._write(answer_text.finish())
        return FinishReason.STOP if answer_text.stopped else finish

    def _write(self, text: str) -> None:
        known = min(self._known_chars, len(text))
        self._known_chars -= known
        if len(text) > known:
            self._stream.write(self.answer.text_event(text[known:]))


def _not_their_own() -> InternalError:
    return InternalError("a worker that takes calls answered without its engine's own bytes")


class _Head(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str


_head = msgspec.json.Decoder(_Head)


def _answer_like(first_raw: bytes, kind: Kind, call: Call) -> Answer:
    """Return what writes on an answer that began with ``first_raw``."""
    line = first_raw.partition(b"data:")[2].partition(b"\n")[0]
    try:
        head = _head.decode(line)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the lost engine's answer has no id, created and model: {error}") from error
    return Answer(
        kind,
        answer_id=head.id,
        model=head.model,
        created_s=head.created,
        usage_null=call.stream_options.include_usage,
    )
