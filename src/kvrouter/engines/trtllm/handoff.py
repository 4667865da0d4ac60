"""The handoff of TensorRT-LLM: what a context-only answer carries to the decode leg.

Usually its KV, by what the engine says of it. Where the first token ended the answer, the answer itself: a
decode engine would go on behind its end.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json import Unreadable, converted, decoded
from kvrouter.core.requests import KvTransferParams, TokenBuffer
from kvrouter.engines.openai.events import AnswerEvent, Choice, ReadEvent, read_event
from kvrouter.transports.requests.port import EngineFailed

_GOES_ON = frozenset({"length", "not_finished"})
"""The finish reasons of a context-only answer that is to be gone on with."""

T = TypeVar("T")

_Fields = dict[str, msgspec.Raw]

PromptIds = list[int | list[int]]


class ContextHandoff(msgspec.Struct, frozen=True, omit_defaults=True):
    """``disaggregated_params`` are the engine's own. ``prompt_token_ids`` are set where the prefill engine's
    are not the router's. ``answer`` is the whole one, in JSON, where nothing is left to do.
    """

    disaggregated_params: dict[str, object] | None = None
    prompt_token_ids: PromptIds | None = None
    usage: dict[str, object] | None = None
    answer: str | None = None

    @classmethod
    def of(cls, params: KvTransferParams) -> "ContextHandoff":
        """Read what a prefill worker handed over; raise EngineFailed for what is none of TensorRT-LLM's."""
        try:
            handoff = converted(params, cls)
        except Unreadable as error:
            raise EngineFailed(f"what the prefill worker handed over cannot be read: {error}") from error
        if handoff.disaggregated_params is None and handoff.answer is None:
            raise EngineFailed("what the prefill worker handed over is none of TensorRT-LLM's")
        return handoff

    @property
    def for_decode(self) -> Mapping[str, object]:
        """The ``disaggregated_params`` of the decode leg: what came, and the usage where there is a field."""
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
    """Reads the answer to a prefill leg whose prompt the router takes to be ``token_ids``."""

    def __init__(self, token_ids: TokenBuffer) -> None:
        self._token_ids = token_ids

    def __call__(self, data: bytes) -> AnswerEvent:
        """Return what it says; raise ProtocolError for what is no answer."""
        event = read_event(data)
        if event.error is not None:
            return event
        said = decoded(_context, data, _ANSWER, param="data")
        if len(said.choices) != 1:
            raise ProtocolError(f"choices: one is handed over, not {len(said.choices)}", param="choices")
        (choice,) = said.choices
        handoff: ContextHandoff | None = None
        finish = choice.finish_reason
        if finish in _GOES_ON:
            finish = "length"
            if choice.disaggregated_params is not None:
                handoff = ContextHandoff(
                    choice.disaggregated_params, self._unlike(said.prompt_token_ids), said.usage
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
    """Return a whole answer as the client asked for it, and what reads that; raise EngineFailed for none."""
    try:
        event = read_event(answer)
        raw = _as_stream(answer, has_usage=has_usage) if is_streamed else answer
    except ProtocolError as error:
        raise EngineFailed(f"what the prefill worker handed over cannot be read: {error.message}") from error
    return raw, lambda _: event


def _as_stream(answer: bytes, *, has_usage: bool) -> bytes:
    whole = decoded(_fields, answer, _ANSWER, param="data")
    names = ("id", "object", "created", "model")
    shared: dict[str, object] = {name: whole[name] for name in names if name in whole}
    if bytes(whole.get("object", _null)) == b'"chat.completion"':
        shared["object"] = "chat.completion.chunk"
    events: list[Mapping[str, object]] = [
        {**shared, "choices": [_piece_of(choice) for choice in _choices_of(whole)]}
    ]
    if has_usage:
        events.append({**shared, "choices": [], "usage": whole.get("usage", _null)})
    data = (*(msgspec.json.encode(event) for event in events), b"[DONE]")
    return b"".join(b"data: %b\n\n" % each for each in data)


def _piece_of(choice: _Fields) -> _Fields:
    """A choice of a stream: its message is called a delta there, and what is null is left out."""
    names = ("index", "message", "text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    piece = {name: choice[name] for name in names if name in choice and bytes(choice[name]) != b"null"}
    if "message" in piece:
        piece["delta"] = piece.pop("message")
    return piece


def without_handoff(answer: bytes) -> bytes:
    """Return a whole answer as an engine writes it that was not asked for a handoff: where KV waits, and how
    engines reach each other, is nothing for clients.
    """
    whole = decoded(_fields, answer, _ANSWER, param="data")
    choices = _choices_of(whole)
    for choice in choices:
        choice["disaggregated_params"] = _null
    whole["choices"] = msgspec.Raw(msgspec.json.encode(choices))
    if "prompt_token_ids" in whole:
        whole["prompt_token_ids"] = _null
    return msgspec.json.encode(whole)


def _choices_of(whole: _Fields) -> list[_Fields]:
    return decoded(_choices, bytes(whole.get("choices", b"[]")), _ANSWER, param="data")
