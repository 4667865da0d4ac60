"""Chunks of an OpenAI answer: tokens, text, usage, finish reason.

Only the fields that routing needs are read; fields of another type pass unread. Output that was requested for
the router, and not by the client, is cut out of the bytes again; all other bytes pass as the engine wrote
them.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvrouter.core.json import Unreadable, parsed
from kvrouter.core.requests import FinishReason, KvTransferParams

T = TypeVar("T")

CountInt = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""A count of tokens: what every wire carries."""


class CachedTokens(msgspec.Struct, frozen=True):
    """``prompt_tokens_details``."""

    cached_tokens: CountInt | None = None


class AnswerUsage(msgspec.Struct, frozen=True):
    """``usage``."""

    prompt_tokens: CountInt | None = None
    completion_tokens: CountInt | None = None
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Return how many prompt tokens the engine had cached; None if it does not report it."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Message(msgspec.Struct, frozen=True):
    """A message or a delta. Other fields than plain text are only checked for presence."""

    content: str | None = None
    reasoning: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET

    @property
    def is_plain(self) -> bool:
        others = (
            self.reasoning,
            self.reasoning_content,
            self.tool_calls,
            self.function_call,
            self.refusal,
            self.audio,
        )
        return all(isinstance(other, UnsetType) or bytes(other) in _NOTHING for other in others)


TokenInt = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""A token id that can be sent to a router; other values are unread."""


class Choice(msgspec.Struct, frozen=True):
    """One of the answers, or a piece of it."""

    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: tuple[TokenInt, ...] | None = None


class Failure(msgspec.Struct, frozen=True):
    """An error where an answer should be."""

    message: str = ""
    code: int | str | None = None
    param: str | None = None


class AnswerEvent(msgspec.Struct, frozen=True):
    """One event of a stream, or a whole answer."""

    choices: tuple[Choice, ...] = ()
    usage: AnswerUsage | None = None
    error: Failure | None = None
    kv_transfer_params: KvTransferParams | None = None
    system_fingerprint: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of its one choice, where the engine sends them."""
        if len(self.choices) != 1:
            return ()
        return self.choices[0].token_ids or ()

    @property
    def tells_tokens(self) -> bool:
        """Whether it has the tokens that its text is made of."""
        return len(self.choices) == 1 and self.choices[0].token_ids is not None

    @property
    def text_chars(self) -> int | None:
        """How many characters of plain text it brings; None when it brings anything else."""
        chars = 0
        for choice in self.choices:
            message = choice.delta or choice.message
            if message is not None:
                if not message.is_plain:
                    return None
                chars += len(message.content or "")
            chars += len(choice.text or "")
        return chars

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        for choice in self.choices:
            if choice.finish_reason:
                return finish_of(choice.finish_reason)
        return None

    @property
    def is_usage_alone(self) -> bool:
        """Whether it is the event that ``stream_options.include_usage`` adds."""
        return not self.choices and self.usage is not None and self.error is None


class UnreadEvent(AnswerEvent, frozen=True):
    """One of which not everything could be read: what could be, and ``why``. Nobody could go on from it."""

    why: str = ""

    @property
    def text_chars(self) -> int | None:
        """None: it is unknown whether its text is plain."""
        return None


class _Fields(msgspec.Struct, frozen=True):
    """The fields of an event, each as raw JSON."""

    choices: Raw = Raw(b"null")
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")
    kv_transfer_params: Raw = Raw(b"null")
    system_fingerprint: Raw = Raw(b"null")


ODD_CHOICES_READ = 128
"""How many choices are read one by one if one of them cannot be read."""


class _ChoiceFields(msgspec.Struct, frozen=True):
    index: Raw = Raw(b"0")
    finish_reason: Raw = Raw(b"null")


ReadEvent = Callable[[bytes], AnswerEvent]
"""Reads the data of one event, or a whole answer; an :class:`UnreadEvent` where it cannot. A reader of
answers that are no client's raises ProtocolError.
"""

_NOTHING = frozenset({b"null", b"[]", b'""'})

_event = msgspec.json.Decoder(AnswerEvent)
_fields = msgspec.json.Decoder(_Fields)
_choices = msgspec.json.Decoder(list[Raw] | None)
_choice = msgspec.json.Decoder(_ChoiceFields)
_usage = msgspec.json.Decoder(AnswerUsage | None)
_error = msgspec.json.Decoder(Failure | None)
_kv_params = msgspec.json.Decoder(KvTransferParams | None)
_text = msgspec.json.Decoder(str | None)
_index = msgspec.json.Decoder(int)


class Unasked(StrEnum):
    """The bytes that an engine writes in place of tokens that are not requested."""

    NULL = "null"
    NOTHING = "nothing"


_TOKEN_FIELDS = re.compile(rb'(,\s*"(?:prompt_token_ids|token_ids)"\s*:\s*)\[[0-9,\s]*\]')
"""The fields that ``return_token_ids`` fills. Quotes inside a text are escaped, so no text matches."""

_EMPTY_DELTA = re.compile(rb'"delta"\s*:\s*\{\s*\}')

_FINISHES = {
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "cancelled": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
}


def read_event(data: bytes) -> AnswerEvent:
    """Return the event in ``data``; an :class:`UnreadEvent` if not all of it can be read."""
    try:
        return parsed(_event, data)
    except Unreadable as error:
        return _read_fields(data, f"the engine's answer: {error}")


def _read_fields(data: bytes, why: str) -> UnreadEvent:
    """Read field by field: one that is odd takes no other with it."""
    try:
        fields = parsed(_fields, data)
    except Unreadable:
        return UnreadEvent(why=why)
    choices = _read(_choices, fields.choices, [fields.choices]) or []
    return UnreadEvent(
        choices=tuple(map(_odd_choice, choices[:ODD_CHOICES_READ])),
        usage=_read(_usage, fields.usage, AnswerUsage()),
        error=_read(_error, fields.error, None),
        kv_transfer_params=_read(_kv_params, fields.kv_transfer_params, None),
        system_fingerprint=_read(_text, fields.system_fingerprint, None),
        why=why,
    )


def _odd_choice(raw: Raw) -> Choice:
    fields = _read(_choice, raw, _ChoiceFields(index=raw))
    return Choice(
        index=_read(_index, fields.index, -1), finish_reason=_read(_text, fields.finish_reason, None)
    )


def _read(decoder: "msgspec.json.Decoder[T]", raw: Raw, otherwise: T) -> T:
    try:
        return parsed(decoder, raw)
    except Unreadable:
        return otherwise


def exists_for_tokens(event: AnswerEvent, raw: bytes) -> bool:
    """Whether an event of one answer exists only for its tokens: vLLM skips it for clients that request no
    tokens, while its parsers wait, such as for the rest of a character.
    """
    return (
        event.finish is None
        and _EMPTY_DELTA.search(raw) is not None
        and _TOKEN_FIELDS.search(raw) is not None
    )


def with_fingerprint(raw: bytes, fingerprint: str) -> bytes:
    """Return a last event with its engine's fingerprint, behind its choices as vLLM writes it."""
    begin, brace, end = raw.rpartition(b"}")
    fields = _read(_fields, Raw(raw.partition(b"data:")[2]), _Fields())
    choices = bytes(fields.choices)
    before, found, behind = raw.partition(choices)
    if choices != b"null" and found:
        begin, brace, end = before + found, b"", behind
    return b'%b,"system_fingerprint":%b%b%b' % (begin, msgspec.json.encode(fingerprint), brace, end)


def without_token_ids(raw: bytes, unasked: Unasked = Unasked.NULL) -> bytes:
    """Return an event as it would be without ``return_token_ids``."""
    if b'token_ids"' not in raw:
        return raw
    return _TOKEN_FIELDS.sub(rb"\1null" if unasked is Unasked.NULL else b"", raw)


def finish_of(reason: str) -> FinishReason:
    """Return the finish reason for an engine's own: any reason but a limit or a failure is a stop."""
    return _FINISHES.get(reason, FinishReason.STOP)
