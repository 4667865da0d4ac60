"""Passthrough responses: the engine's bytes go to the client unchanged, and its tokens are counted.

When the engine is lost in mid-answer another one goes on from the tokens, and the rest is written here, in
the same form and under the same id.
"""

import asyncio
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvrouter.core.engine_answer import Headers
from kvrouter.core.errors import InternalError, InvalidRequest
from kvrouter.core.json import Unreadable, parsed
from kvrouter.core.requests import EngineChunk, FinishReason, TokenBuffer
from kvrouter.frontend.chat_renderings import Unrendered, UnrenderedReason, unrendered
from kvrouter.frontend.http import SSE_DONE, sse_event
from kvrouter.frontend.openai.answers import AnswerFormat, RouteKind
from kvrouter.frontend.openai.parse import Call
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.frontend.response_writer import EventStream, ResponseWriter, routing_nvext
from kvrouter.router.generation import ANSWERED, Generation
from kvrouter.text.chat import text_chars
from kvrouter.text.model import AnswerText, StopMatcher, TextModel
from kvrouter.text.prompts import prompt_maker
from kvrouter.text.prompts.fields import PromptFields
from kvrouter.text.template_budget import TemplateOverBounds
from kvrouter.text.tokenizer import TOKEN_TEXT_BYTES, EncodePoolFull, utf8_bytes


async def pass_whole(exchange: ResponseWriter, call: Call, generation: Generation) -> None:
    """Answer with the engine's JSON object; of a form, perhaps with its text, which may be empty."""
    pieces: list[bytes] = []
    headers: Headers = ()
    async for chunk in generation:
        pieces.append(chunk.raw)
        headers = headers or chunk.headers
        if chunk.finish is not None:
            break
    body = b"".join(pieces)
    if not body and generation.generated:
        raise _not_their_own()
    nvext = routing_nvext(generation, call.nvext.extra_fields)
    if nvext and _FILLED_OBJECT.fullmatch(body):
        body = body.rstrip()[:-1] + b"," + msgspec.json.encode({"nvext": nvext})[1:]
    await exchange.send(generation, body, headers)


async def pass_stream(
    exchange: ResponseWriter, call: Call, generation: Generation, text: TextModel | None
) -> None:
    """Answer with the engine's events; a client that reads slowly holds back its own engine stream."""
    chunk = await anext(generation)
    stream = exchange.begin_stream(generation, chunk.headers)
    passing = _PassthroughStream(exchange.generates, call, generation, text, stream)
    while True:
        if passing.pass_on(chunk):
            break
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        chunk = await anext(generation)
    generation.close(ANSWERED)
    exchange.end_stream(stream)


async def pass_events(exchange: ResponseWriter, generation: Generation) -> None:
    """Answer with the engine's events, whatever they are; nobody could go on in mid-answer."""
    chunk = await anext(generation)
    stream = exchange.begin_stream(generation, chunk.headers)
    while True:
        stream.write(chunk.comments + chunk.raw)
        if chunk.finish is not None:
            break
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        chunk = await anext(generation)
    generation.close(ANSWERED)
    exchange.end_stream(stream)


class _PassthroughStream:
    """One stream, and what is kept of it in case that somebody else must go on."""

    def __init__(
        self, kind: RouteKind, call: Call, generation: Generation, text: TextModel | None, stream: EventStream
    ) -> None:
        self._kind = kind
        self._call = call
        self._generation = generation
        self._text = text
        self._stream = stream
        self._first_raw = b""
        self._text_chars = 0
        self._has_nvext = False
        self._rest: _Rest | None = None

    def pass_on(self, chunk: EngineChunk) -> bool:
        """Send what ``chunk`` brings; return whether the answer is complete."""
        if not self._generation.resumes:
            if chunk.token_ids and not (chunk.raw or self._first_raw):
                raise _not_their_own()
            self._first_raw = self._first_raw or chunk.raw
            self._text_chars += chunk.text_chars or 0
            self._stream.write(chunk.comments + self._with_nvext(chunk))
            return chunk.finish is not None
        self._stream.write(chunk.comments)
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
        if not self._first_raw or self._text is None:
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

    def _end(self, answer: AnswerFormat, finish: FinishReason) -> None:
        write = self._stream.write
        write(answer.last_event(finish, nvext=self._nvext()))
        if self._call.stream_options.include_usage:
            write(answer.usage_event(self._generation.usage))
        write(SSE_DONE)

    def _with_nvext(self, chunk: EngineChunk) -> bytes:
        """The engine's bytes, with the event that the client asked of the router at their end."""
        raw = chunk.raw
        is_done = raw.endswith(SSE_DONE)
        if self._has_nvext or not (is_done or chunk.finish is not None):
            return raw
        self._has_nvext = True
        nvext = self._nvext()
        if not nvext:
            return raw
        event = sse_event(msgspec.json.encode({"choices": [], "nvext": nvext}))
        return raw.removesuffix(SSE_DONE) + event + SSE_DONE if is_done else raw + event

    def _nvext(self) -> Mapping[str, object] | None:
        return routing_nvext(self._generation, self._call.nvext.extra_fields)


class _Rest:
    """The rest of an answer that another engine began, from its tokens."""

    def __init__(
        self,
        answer: AnswerFormat,
        stream: EventStream,
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


_DATA_LINE = re.compile(rb"(?:\A|[\r\n])data:([^\r\n]*)")

_FILLED_OBJECT = re.compile(rb"\s*+\{\s*+[^}\s].*\}\s*+", re.DOTALL)
"""What a field can be added to at its end."""


def _not_their_own() -> InternalError:
    return InternalError("a worker that takes calls answered without its engine's own bytes")


class _Head(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str


_head = msgspec.json.Decoder(_Head)


def _answer_like(first_raw: bytes, kind: RouteKind, call: Call) -> AnswerFormat:
    """Return what writes on an answer that began with ``first_raw``."""
    line = _DATA_LINE.search(first_raw)
    try:
        head = parsed(_head, b"" if line is None else line[1])
    except Unreadable as error:
        raise InternalError(f"the lost engine's answer has no id, created and model: {error}") from error
    return AnswerFormat(
        kind,
        answer_id=head.id,
        model=head.model,
        created_s=head.created,
        usage_null=call.stream_options.include_usage,
    )


LONG_BODY_BYTES = 64 * 1024
"""The prompt of a longer call is made in a thread: images in it are hashed, and take a while to read."""


class PassthroughTokens(NamedTuple):
    """A prompt's tokens; ``is_exact``: they are all of them and for certain. With ``has_media`` some stand
    for what is no text, and nobody here knows what an engine makes of it. Without any tokens
    ``estimate`` is how many there may be, 0 where nothing is known. ``missing`` tells
    why no prompt could be made of a chat; these are the first of its texts then.
    """

    token_ids: TokenBuffer
    is_exact: bool
    has_media: bool = False
    estimate: int = 0
    missing: Unrendered | None = None

    @property
    def is_cut(self) -> bool:
        """Whether no prompt could be made of the call, for another reason than its length."""
        return self.missing is not None and self.missing.reason is not UnrenderedReason.TOO_LONG


async def passthrough_tokens(
    passed: PassthroughCall, text: TextModel | None, engine_kind: str
) -> PassthroughTokens:
    """Return what routing may know of the prompt that an engine of this kind makes; without a ``text`` only a
    prompt in token ids is known.
    """
    if text is None or (passed.chat is None and passed.prompt is None):
        return _estimated(passed)
    try:
        return await _known_tokens(passed, text, engine_kind)
    except EncodePoolFull:
        return _estimated(passed)  # others' prompts are no reason to refuse a call that its engine would take


async def _known_tokens(passed: PassthroughCall, text: TextModel, engine_kind: str) -> PassthroughTokens:
    if passed.chat is None:
        return await _prompt_tokens(passed, text)
    known: Sequence[object] = _said(passed.chat)
    has_media = False
    try:
        make = partial(prompt_maker(engine_kind), passed.chat, text.chat_template.traits)
        is_long = len(passed.client_call.body) > LONG_BODY_BYTES
        prompt = await asyncio.to_thread(make) if is_long else make()
        known, has_media = prompt.messages, prompt.has_media
        token_ids = await text.encode_made(prompt)
    except (InvalidRequest, TemplateOverBounds) as error:
        # Whether these messages are wrong, or too long, is the engine's to say: it may have another template.
        beginning = await text.encode_beginning(_beginning(known, text.prompt_max_chars))
        missing = unrendered(text, error)
        return PassthroughTokens(beginning, is_exact=False, has_media=has_media, missing=missing)
    goes_on = prompt.continues or bool(prompt.continuation)
    is_exact = prompt.is_whole and not has_media and not goes_on and not passed.is_partial
    return PassthroughTokens(token_ids, is_exact, has_media)


def _estimated(passed: PassthroughCall) -> PassthroughTokens:
    """A prompt that is counted by its text, and not read."""
    if passed.chat is not None:
        chat = passed.chat
        said = chat.messages if chat.messages is not None else chat.input
        tokens = estimated_tokens(said, chat.tools, chat.instructions, chat.system)
    elif passed.prompt is None:
        tokens = passed.unread_tokens
    elif not isinstance(passed.prompt.content, str):
        return PassthroughTokens(passed.prompt.content, is_exact=False)
    else:
        tokens = estimated_tokens(passed.prompt.content)
    return PassthroughTokens(array("I"), is_exact=False, estimate=tokens)


def estimated_tokens(prompt: object, *more: object) -> int:
    """Return how many tokens a text, or the messages of a chat, and what goes with them may have, by their
    bytes.
    """
    texts = (prompt,) if isinstance(prompt, str) else _texts(prompt if isinstance(prompt, list) else ())
    return -(-(sum(map(utf8_bytes, texts)) + text_chars(more)) // TOKEN_TEXT_BYTES)


def _said(chat: PromptFields) -> Sequence[object]:
    said = chat.messages if chat.messages is not None else chat.input
    return said if isinstance(said, list) else ()


async def _prompt_tokens(passed: PassthroughCall, text: TextModel) -> PassthroughTokens:
    if passed.prompt is None:
        return PassthroughTokens(array("I"), is_exact=False)
    content, is_only = passed.prompt
    is_exact = is_only and not passed.is_partial
    if not isinstance(content, str):
        return PassthroughTokens(content, is_exact)
    try:
        return PassthroughTokens(await text.encode_prompt(content), is_exact)
    except InvalidRequest:
        # Too long is what its engine calls too long: it may cut prompts.
        return PassthroughTokens(await text.encode_beginning(content), is_exact=False)


def _beginning(messages: Sequence[object], chars_max: int) -> str:
    """The first characters of the texts in messages. No more of them is looked at: they may be megabytes."""
    found: list[str] = []
    for text in _texts(messages):
        found.append(text[:chars_max])
        chars_max -= len(text) + 1
        if chars_max <= 0:
            break
    return "\n".join(found)


def _texts(messages: Sequence[object]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    yield text
