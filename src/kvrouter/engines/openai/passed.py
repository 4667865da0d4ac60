"""Calls of routes that the router does not interpret: engines and clients get them as they are.

Only the end of a streamed answer is read, and its count of tokens, if it has one.
"""

import msgspec

from kvrouter.core.json import Unreadable, parsed
from kvrouter.core.requests import ClientCall, ClientForm
from kvrouter.engines.openai.answer_events import AnswerEvent, AnswerUsage, CachedTokens, Choice, ReadEvent
from kvrouter.engines.openai.bodies import Body, bytes_of
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.sse import AnswerReading

_ENDS = frozenset(
    {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "message_stop",
        "transcript.text.done",
        "error",
    },
)
"""The last events of streams of OpenAI's Responses and transcriptions, and of Anthropic's Messages. Engines
may also stream transcriptions as they stream chats.
"""

_AT_AN_END = (Choice(finish_reason="stop"),)
_ABORTED = (Choice(finish_reason="abort"),)


class _Usage(AnswerUsage, frozen=True):
    """A count of tokens under OpenAI's names, or Anthropic's."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: CachedTokens | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def counted(self) -> AnswerUsage:
        prompt, answer = self.prompt_tokens, self.completion_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        if prompt is None and self.input_tokens is not None:
            # Anthropic counts what was read from a cache, or written into one, apart from the rest.
            apart = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
            prompt = self.input_tokens + apart
        if self.cache_read_input_tokens is not None:
            details = CachedTokens(self.cache_read_input_tokens)
        return AnswerUsage(prompt, self.output_tokens if answer is None else answer, details)


class _Inner(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    status: msgspec.Raw = msgspec.Raw(b"null")


class _Delta(msgspec.Struct, frozen=True):
    stop_reason: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Piece(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Meta(_Usage, frozen=True):
    """The ``meta_info`` of SGLang's own routes; ``finish_reason`` is null until the answer has ended."""

    finish_reason: object = None
    cached_tokens: int | None = None

    @property
    def counted(self) -> AnswerUsage:
        cached = None if self.cached_tokens is None else CachedTokens(self.cached_tokens)
        return AnswerUsage(self.prompt_tokens, self.completion_tokens, cached)


class _Answer(msgspec.Struct, frozen=True):
    """A whole answer, or one event; some events hold the answer so far."""

    type: str = ""
    choices: tuple[_Piece, ...] = ()
    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    meta_info: _Meta | None = None
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: msgspec.Raw = msgspec.Raw(b"null")
    delta: msgspec.Raw = msgspec.Raw(b"{}")
    stop_reason: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_aborted(self) -> bool:
        """Whether the engine aborted it: vLLM then writes a message without a reason to stop, and a response
        that is cancelled.
        """
        if self.type == "message":
            return bytes(self.stop_reason) == b"null"
        if self.type == "message_delta":
            return self.delta_stop_reason == b"null"
        inner = None if self.response is None else self.response.status
        is_cancelled = _CANCELLED in (bytes(self.status), b"" if inner is None else bytes(inner))
        return is_cancelled or any(piece.finish_reason == "abort" for piece in self.choices)

    @property
    def delta_stop_reason(self) -> bytes | None:
        """Why a message stops, from the event that reports it; None in other events."""
        try:
            reason = parsed(_delta, self.delta).stop_reason
        except Unreadable:
            return None
        return None if isinstance(reason, msgspec.UnsetType) else bytes(reason)


_CANCELLED = b'"cancelled"'

_answer = msgspec.json.Decoder(_Answer)
_delta = msgspec.json.Decoder(_Delta)


def passed_call(call: ClientCall, body: Body, headers: dict[str, str] | None = None) -> EngineCall:
    """Return the call that sends ``body``, the body of ``call`` with the router's fields."""
    return EngineCall(
        path=call.route.value,
        body=bytes_of(body),
        headers=headers or {},
        streams=call.stream,
        reading=AnswerReading(passes_raw=True, shows_aborts=False, has_choices=False),
        reader=_reads_events if call.stream else _reads_whole,
    )


def passed_form(call: ClientCall, form: ClientForm, *, model: str | None) -> EngineCall:
    """Return how an engine is sent a form, byte for byte; but for the name of its model where the engine has
    another, which is ``model``.
    """
    body = call.body
    if model is not None and form.model_at is not None:
        begin, end = form.model_at
        name = model.encode()
        if body[begin:end] != name:
            body = b"".join((body[:begin], name, body[end:]))
    return EngineCall(
        path=call.route.value,
        body=body,
        headers={"content-type": form.content_type},
        streams=call.stream,
        reading=AnswerReading(passes_raw=True, has_choices=False),
        reader=_reads_events if call.stream else _reads_whole,
    )


def _reads_events() -> ReadEvent:
    return _read_event


def _reads_whole() -> ReadEvent:
    return _read_whole


def _read_event(data: bytes) -> AnswerEvent:
    answer = _decoded(data)
    if answer.is_aborted:
        return AnswerEvent(choices=_ABORTED, usage=_usage_of(answer))
    is_last = (
        answer.type in _ENDS
        or not isinstance(answer.error, msgspec.UnsetType)
        or any(piece.finish_reason for piece in answer.choices)
        or (answer.meta_info is not None and answer.meta_info.finish_reason is not None)
    )
    return AnswerEvent(choices=_AT_AN_END if is_last else (), usage=_usage_of(answer))


def _read_whole(data: bytes) -> AnswerEvent:
    answer = _decoded(data)
    return AnswerEvent(choices=_ABORTED if answer.is_aborted else _AT_AN_END, usage=_usage_of(answer))


def _decoded(data: bytes) -> _Answer:
    """Return the readable fields of an answer; another form, or other names, are no error."""
    try:
        return parsed(_answer, data)
    except Unreadable:
        return _Answer()


def _usage_of(answer: _Answer) -> AnswerUsage | None:
    inner = [each.usage for each in (answer.response, answer.message) if each is not None]
    for found in (answer.usage, *inner, answer.meta_info):
        if found is not None:
            return found.counted
    return None
