"""The handoff of TensorRT-LLM: the values that a context-only answer passes to the decode leg.

Usually they locate its KV. If the first token ended the answer, they are the answer itself: a decode engine
would continue behind its end.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json import Unreadable, converted, decoded
from kvrouter.core.requests import KvTransferParams, TokenBuffer
from kvrouter.engines.openai.answer_events import AnswerEvent, Choice, ReadEvent, read_event
from kvrouter.transports.requests.port import EngineFailed

_GOES_ON = frozenset({"length", "not_finished"})
"""The finish reasons of a context-only answer that is to be gone on with."""

T = TypeVar("T")

_Fields = dict[str, msgspec.Raw]

PromptIds = list[int | list[int]]


class ContextHandoff(msgspec.Struct, frozen=True, omit_defaults=True):
    """``disaggregated_params`` are the engine's own. ``prompt_token_ids`` are set if the prefill engine's
    differ from the router's. ``answer`` is the whole answer, in JSON, if no decoding is left.
    """

    disaggregated_params: dict[str, object] | None = None
    prompt_token_ids: PromptIds | None = None
    usage: dict[str, object] | None = None
    answer: str | None = None

    @classmethod
    def of(cls, params: KvTransferParams) -> "ContextHandoff":
        """Read the params from a prefill worker; raise EngineFailed if they are not TensorRT-LLM's."""
        try:
            handoff = converted(params, cls)
        except Unreadable as error:
            raise EngineFailed(f"what the prefill worker handed over cannot be read: {error}") from error
        if handoff.disaggregated_params is None and handoff.answer is None:
            raise EngineFailed("what the prefill worker handed over is none of TensorRT-LLM's")
        return handoff

    @property
    def for_decode(self) -> Mapping[str, object]:
        """Return the ``disaggregated_params`` of the decode leg, with the usage if it has the field."""
        fetch: dict[str, object] = {**(self.disaggregated_params or {}), "request_type": "generation_only"}
        if "ctx_usage" in fetch and self.usage is not None:
            fetch["ctx_usage"] = self.usage
        return fetch


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    disaggregated_params: dict[str, object] | None = None


class _Context(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, object] | None = None
    prompt_token_ids: PromptIds | None = None


_context = msgspec.json.Decoder(_Context)
_fields = msgspec.json.Decoder(_Fields)
_choices = msgspec.json.Decoder(list[_Fields])
_null = msgspec.Raw(b"null")
_ANSWER = "the engine's answer"


class PrefillReader:
    """Reads the answer to a prefill leg; ``token_ids`` are the router's tokens of its prompt."""

    def __init__(self, token_ids: TokenBuffer) -> None:
        self._token_ids = token_ids

    def __call__(self, data: bytes) -> AnswerEvent:
        """Return the event; raise ProtocolError if it is no answer."""
        event = read_event(data)
        if event.error is not None:
            return event
        answer = decoded(_context, data, _ANSWER, param="data")
        if len(answer.choices) != 1:
            raise ProtocolError(f"choices: one is handed over, not {len(answer.choices)}", param="choices")
        (choice,) = answer.choices
        handoff: ContextHandoff | None = None
        finish = choice.finish_reason
        if finish in _GOES_ON:
            finish = "length"
            if choice.disaggregated_params is not None:
                handoff = ContextHandoff(
                    choice.disaggregated_params, self._unlike(answer.prompt_token_ids), answer.usage
                )
        elif finish is not None:
            handoff = ContextHandoff(answer=without_handoff(data).decode())
        return replace(
            event,
            choices=(Choice(finish_reason=finish),),
            kv_transfer_params=None if handoff is None else msgspec.to_builtins(handoff),
        )

    def _unlike(self, prompt: PromptIds | None) -> PromptIds | None:
        if prompt is not None and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = [*prompt[0]]
        return None if prompt is None or prompt == self._token_ids.tolist() else prompt


def answered_as(answer: bytes, *, is_streamed: bool, has_usage: bool) -> tuple[bytes, ReadEvent]:
    """Return a whole answer as the client requested it, and its reader; raise EngineFailed if it is none."""
    try:
        event = read_event(answer)
        raw = _as_stream(answer, has_usage=has_usage) if is_streamed else answer
    except ProtocolError as error:
        raise EngineFailed(f"what the prefill worker handed over cannot be read: {error.message}") from error
    return raw, lambda _: event


def _as_stream(answer: bytes, *, has_usage: bool) -> bytes:
    answer_fields = decoded(_fields, answer, _ANSWER, param="data")
    names = ("id", "object", "created", "model")
    shared: dict[str, object] = {name: answer_fields[name] for name in names if name in answer_fields}
    if bytes(answer_fields.get("object", _null)) == b'"chat.completion"':
        shared["object"] = "chat.completion.chunk"
    events: list[Mapping[str, object]] = [
        {**shared, "choices": [_piece_of(choice) for choice in _choices_of(answer_fields)]}
    ]
    if has_usage:
        events.append({**shared, "choices": [], "usage": answer_fields.get("usage", _null)})
    data = (*(msgspec.json.encode(event) for event in events), b"[DONE]")
    return b"".join(b"data: %b\n\n" % each for each in data)


def _piece_of(choice: _Fields) -> _Fields:
    """Return a choice in the form of a stream: its message is called delta, and null fields are left out."""
    names = ("index", "message", "text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    piece = {name: choice[name] for name in names if name in choice and bytes(choice[name]) != b"null"}
    if "message" in piece:
        piece["delta"] = piece.pop("message")
    return piece


def without_handoff(answer: bytes) -> bytes:
    """Return a whole answer without the fields of a handoff: clients need not know where KV waits, and how
    engines reach each other.
    """
    answer_fields = decoded(_fields, answer, _ANSWER, param="data")
    choices = _choices_of(answer_fields)
    for choice in choices:
        choice["disaggregated_params"] = _null
    answer_fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
    if "prompt_token_ids" in answer_fields:
        answer_fields["prompt_token_ids"] = _null
    return msgspec.json.encode(answer_fields)


def _choices_of(answer_fields: _Fields) -> list[_Fields]:
    return decoded(_choices, bytes(answer_fields.get("choices", b"[]")), _ANSWER, param="data")
