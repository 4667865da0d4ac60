"""Chunks of an OpenAI answer: tokens, text, usage, finish reason.

Only what routing needs is read. What was asked of the engine for the router's sake, and not by the client, is
cut out of the bytes again; everything else passes as the engine wrote it.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvrouter.core.json import decoded
from kvrouter.core.requests import FinishReason, KvTransferParams


class CachedTokens(msgspec.Struct, frozen=True):
    """``prompt_tokens_details``."""

    cached_tokens: int | None = None


class AnswerUsage(msgspec.Struct, frozen=True):
    """``usage``."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many prompt tokens the engine had cached; None when it does not say."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Words(msgspec.Struct, frozen=True):
    """A message or a delta. What is not plain text is only checked for presence."""

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
"""What travels to a router: an engine that answers with anything else fails its own leg alone."""


class Choice(msgspec.Struct, frozen=True):
    """One of the answers, or a piece of it."""

    index: int = 0
    delta: _Words | None = None
    message: _Words | None = None
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
    def is_first_choice_alone(self) -> bool:
        """Whether it is of the one choice that an answer usually has."""
        return len(self.choices) == 1 and self.choices[0].index == 0

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
            words = choice.delta or choice.message
            if words is not None:
                if not words.is_plain:
                    return None
                chars += len(words.content or "")
            chars += len(choice.text or "")
        return chars

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        for choice in self.choices:
            if choice.finish_reason is not None:
                return finish_of(choice.finish_reason)
        return None

    @property
    def is_usage_alone(self) -> bool:
        """Whether it is the event that ``stream_options.include_usage`` adds."""
        return not self.choices and self.usage is not None and self.error is None


ReadEvent = Callable[[bytes], AnswerEvent]
"""Reads the data of one event, or a whole answer; raises ProtocolError."""

_NOTHING = frozenset({b"null", b"[]", b'""'})

_event = msgspec.json.Decoder(AnswerEvent)


class Unasked(StrEnum):
    """What an engine writes in place of the tokens when nobody asks for them."""

    NULL = "null"
    NOTHING = "nothing"


_TOKEN_FIELDS = re.compile(rb'(,"(?:prompt_token_ids|token_ids)":)\[[0-9, ]*\]')
"""The fields that ``return_token_ids`` fills. A quote inside of a text is escaped, so none of it matches."""

_FINISHES = {
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "cancelled": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
}


def read_event(data: bytes) -> AnswerEvent:
    """Return what an event's data says; raise ProtocolError for what is no answer."""
    return decoded(_event, data, "the engine's answer", param="data")


def without_token_ids(raw: bytes, unasked: Unasked = Unasked.NULL) -> bytes:
    """Return an event as it would be without ``return_token_ids``."""
    return _TOKEN_FIELDS.sub(rb"\1null" if unasked is Unasked.NULL else b"", raw)


def finish_of(reason: str) -> FinishReason:
    """Return an engine's finish reason in our words: what is not a limit or a failure is a stop."""
    return _FINISHES.get(reason, FinishReason.STOP)
