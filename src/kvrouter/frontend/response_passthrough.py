"""Passthrough responses: the engine's bytes go to the client unchanged, and its tokens are counted.

When an engine is lost in mid-answer, another one resumes from the tokens, and the router writes the rest in
the same form and under the same id.
"""

import asyncio
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
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
from kvrouter.text.model import AnswerText, StopMatcher, TextModel
from kvrouter.text.prompts import prompt_maker
from kvrouter.text.prompts.fields import PromptFields
from kvrouter.text.template_budget import TemplateOverBounds
from kvrouter.text.tokenizer import TOKEN_TEXT_BYTES, EncodePoolFull


async def pass_body(writer: ResponseWriter, call: Call, generation: Generation) -> None:
    """Answer with the engine's JSON object, or for a form possibly with its text, which may be empty."""
    pieces: list[bytes] = []
    headers: Headers = ()
    async for chunk in generation:
        pieces.append(chunk.raw)
        headers = headers or chunk.headers
        if chunk.finish is not None:
            break
    body = b"".join(pieces)
    if not body and generation.generated:
        raise _missing_engine_bytes()
    nvext = routing_nvext(generation, call.nvext.extra_fields)
    if nvext and _FILLED_OBJECT.fullmatch(body):
        body = body.rstrip()[:-1] + b"," + msgspec.json.encode({"nvext": nvext})[1:]
    await writer.send(generation, body, headers)


async def pass_stream(
    writer: ResponseWriter, call: Call, generation: Generation, text: TextModel | None
) -> None:
    """Answer with the engine's events; a slow client slows its own engine stream down."""
    chunk = await anext(generation)
    stream = writer.begin_stream(generation, chunk.headers)
    passed_stream = _PassthroughStream(writer.generates, call, generation, text, stream)
    while True:
        if passed_stream.write_chunk(chunk):
            break
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        chunk = await anext(generation)
    generation.close(ANSWERED)
    writer.end_stream(stream)


async def pass_events(writer: ResponseWriter, generation: Generation) -> None:
    """Answer with the engine's events of any form; such an answer cannot be resumed."""
    chunk = await anext(generation)
    stream = writer.begin_stream(generation, chunk.headers)
    while True:
        stream.write(chunk.comments + chunk.raw)
        if chunk.finish is not None:
            break
        if not stream.ready:
            generation.reader_waits()
            await stream.wait_ready()
        chunk = await anext(generation)
    generation.close(ANSWERED)
    writer.end_stream(stream)


class _PassthroughStream:
    """One passed-through stream, with the state to resume it from another engine."""

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
        self._resumed: _ResumedAnswer | None = None

    def write_chunk(self, chunk: EngineChunk) -> bool:
        """Write a chunk to the client; return whether the answer is complete."""
        if not self._generation.resumes:
            if chunk.token_ids and not (chunk.raw or self._first_raw):
                raise _missing_engine_bytes()
            self._first_raw = self._first_raw or chunk.raw
            self._text_chars += chunk.text_chars or 0
            self._stream.write(chunk.comments + self._with_nvext(chunk))
            return chunk.finish is not None
        self._stream.write(chunk.comments)
        if not chunk.token_ids and chunk.finish is None:
            return False
        if self._resumed is None:
            self._resumed = self._resume(chunk)
        finish = self._resumed.push(chunk.token_ids, chunk.finish)
        if finish is None:
            return False
        self._end(self._resumed.answer, finish)
        return True

    def _resume(self, chunk: EngineChunk) -> "_ResumedAnswer":
        if not self._first_raw or self._text is None:
            raise _missing_engine_bytes()
        generated = self._generation.generated
        before = generated[: len(generated) - len(chunk.token_ids)]
        return _ResumedAnswer(
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
        """Return the engine's bytes; the last ones get the ``nvext`` event if the client asked for one."""
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


class _ResumedAnswer:
    """Writes the rest of an answer that another engine began, from its tokens."""

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
        self._delivered_chars = sent_chars
        """How many of the generated characters the client has already."""
        self._write(self._answer_text.push(before))

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> FinishReason | None:
        """Add tokens; return the finish reason, None until the answer is complete."""
        answer_text = self._answer_text
        if not answer_text.stopped:
            self._write(answer_text.push(token_ids))
        if finish is not None and not answer_text.stopped:
            self._write(answer_text.finish())
        return FinishReason.STOP if answer_text.stopped else finish

    def _write(self, text: str) -> None:
        delivered = min(self._delivered_chars, len(text))
        self._delivered_chars -= delivered
        if len(text) > delivered:
            self._stream.write(self.answer.text_event(text[delivered:]))


_DATA_LINE = re.compile(rb"(?:\A|[\r\n])data:([^\r\n]*)")

_FILLED_OBJECT = re.compile(rb"\s*+\{\s*+[^}\s].*\}\s*+", re.DOTALL)
"""A non-empty JSON object, to which a field can be appended."""


def _missing_engine_bytes() -> InternalError:
    return InternalError("a worker that takes calls answered without its engine's own bytes")


class _Head(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str


_head = msgspec.json.Decoder(_Head)


def _answer_like(first_raw: bytes, kind: RouteKind, call: Call) -> AnswerFormat:
    """Return the format of an answer that began with ``first_raw``: same id, model and time of creation."""
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
"""The prompt of a longer call is rendered in a thread, because hashing its images takes time."""


class PassthroughTokens(NamedTuple):
    """A prompt's tokens; ``is_exact`` if they are certainly the engine's, and all of them.

    With ``has_media`` some are placeholders for images and other media. Without tokens, ``estimate`` is their
    estimated number, 0 if unknown, and ``text_ids`` the text, as in
    :attr:`~kvrouter.core.requests.GenerateRequest.text_ids`; None where it is not read. ``missing`` is the
    reason why a chat could not be rendered; the tokens are then the beginning of its texts.
    """

    token_ids: TokenBuffer
    is_exact: bool
    has_media: bool = False
    estimate: int = 0
    text_ids: TokenBuffer | None = None
    missing: Unrendered | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the chat could not be rendered, for another reason than its length."""
        return self.missing is not None and self.missing.reason is not UnrenderedReason.TOO_LONG


async def passthrough_tokens(
    passthrough: PassthroughCall, text: TextModel | None, engine_kind: str
) -> PassthroughTokens:
    """Return the tokens of the prompt as an engine of this kind makes it. Without a ``text`` only token ids
    are exact; the length of a text is estimated.
    """
    if text is None or (passthrough.chat is None and passthrough.prompt is None):
        return _estimated(passthrough)
    try:
        return await _rendered_tokens(passthrough, text, engine_kind)
    except EncodePoolFull:
        return _estimated(passthrough)  # a full pool must not refuse a call that its engine would take


async def _rendered_tokens(
    passthrough: PassthroughCall, text: TextModel, engine_kind: str
) -> PassthroughTokens:
    if passthrough.chat is None:
        return await _prompt_tokens(passthrough, text)
    messages: Sequence[object] = _items(passthrough.chat)
    has_media = False
    try:
        make = partial(prompt_maker(engine_kind), passthrough.chat, text.chat_template.traits)
        is_long = len(passthrough.client_call.body) > LONG_BODY_BYTES
        prompt = await asyncio.to_thread(make) if is_long else make()
        messages, has_media = prompt.messages, prompt.has_media
        token_ids = await text.encode_made(prompt)
    except (InvalidRequest, TemplateOverBounds) as error:
        # The engine judges whether these messages are wrong or too long: its template may differ.
        beginning = await text.encode_beginning(_beginning(messages, text.prompt_max_chars))
        missing = unrendered(text, error)
        return PassthroughTokens(beginning, is_exact=False, has_media=has_media, missing=missing)
    is_continued = prompt.continues or bool(prompt.continuation)
    is_exact = prompt.is_complete and not has_media and not is_continued and not passthrough.is_partial
    return PassthroughTokens(token_ids, is_exact, has_media)


def _estimated(passthrough: PassthroughCall) -> PassthroughTokens:
    """Return token ids as they are, or a text or chat with its estimated length."""
    if passthrough.chat is not None:
        chat = passthrough.chat
        items = chat.messages if chat.messages is not None else chat.input
        text_ids = text_ids_of(items, chat.tools, chat.instructions, chat.system)
    elif passthrough.prompt is None:
        return PassthroughTokens(array("I"), is_exact=False, estimate=passthrough.unread_tokens)
    elif not isinstance(passthrough.prompt.content, str):
        return PassthroughTokens(passthrough.prompt.content, is_exact=False)
    else:
        text_ids = text_ids_of(passthrough.prompt.content)
    return PassthroughTokens(array("I"), is_exact=False, estimate=len(text_ids), text_ids=text_ids)


def text_ids_of(prompt: object, *before: object) -> TokenBuffer:
    """Return the texts of fields ``before`` and of a prompt, a text or a chat's messages: one number for each
    ``TOKEN_TEXT_BYTES``, and so as many as the estimated tokens.
    """
    messages = prompt if isinstance(prompt, list) else ()
    texts = chain(_all_texts(before), (prompt,) if isinstance(prompt, str) else _texts(messages))
    data = "".join(texts).encode("utf-8", "surrogatepass")
    return array("I", data + bytes(-len(data) % TOKEN_TEXT_BYTES))


def _all_texts(fields: Sequence[object]) -> Iterator[str]:
    """Yield every text in ``fields``, well formed or not, including names of fields."""
    left = list(reversed(fields))
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += chain.from_iterable(reversed(value.items()))
        elif isinstance(value, list):
            left += reversed(value)


def _items(chat: PromptFields) -> Sequence[object]:
    items = chat.messages if chat.messages is not None else chat.input
    return items if isinstance(items, list) else ()


async def _prompt_tokens(passthrough: PassthroughCall, text: TextModel) -> PassthroughTokens:
    if passthrough.prompt is None:
        return PassthroughTokens(array("I"), is_exact=False)
    content, is_only = passthrough.prompt
    is_exact = is_only and not passthrough.is_partial
    if not isinstance(content, str):
        return PassthroughTokens(content, is_exact)
    try:
        return PassthroughTokens(await text.encode_prompt(content), is_exact)
    except InvalidRequest:
        # The engine judges whether a prompt is too long: it may truncate it.
        return PassthroughTokens(await text.encode_beginning(content), is_exact=False)


def _beginning(messages: Sequence[object], chars_max: int) -> str:
    """Return the first ``chars_max`` characters of the messages' texts, without reading the rest."""
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
