"""A call from its body: validated sampling and routing hints, before anything is tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank, ModelName, WorkerId
from kvrouter.core.requests import Sampling, TokenBuffer
from kvrouter.frontend.openai.decode import decode_body, read_messages, read_prompt, refuse_fields
from kvrouter.frontend.openai.nvext import NvextReader
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.openai.schema import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    NvExt,
    StreamOptions,
)

_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)

STOP_TOKENS_MAX = 64
READER = NvextReader()
"""Reads a call without headers, and refuses what is not known."""

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for ``max_tokens`` of a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a generation call asks for, whatever its route; nothing here refers to its body.

    ``max_tokens`` None: up to the context length.
    """

    model: ModelName
    """The model that the client names."""
    stream: bool
    """Whether the answer comes as server-sent events."""
    max_tokens: int | None
    max_tokens_field: str
    stops: tuple[str, ...]
    nvext: NvExt
    stream_options: StreamOptions
    unbounded_sampling: Sampling
    """The sampling, without its ``max_tokens``."""

    @property
    def constraints(self) -> RoutingConstraints:
        """Required and preferred taints."""
        return self.nvext.routing_constraints

    @property
    def override(self) -> RouterConfigOverride:
        """Settings of the decision for this request alone."""
        return self.nvext.router_config_override

    @property
    def pin(self) -> Pin | None:
        """The worker that must decode, or serve the whole request."""
        return pin_of(self.nvext.worker_id, self.nvext.dp_rank)

    @property
    def prefill_pin(self) -> Pin | None:
        """The worker that must prefill."""
        return pin_of(self.nvext.prefill_worker_id, self.nvext.prefill_dp_rank)

    @property
    def cache_namespace(self) -> str | None:
        """What keeps this request's KV blocks apart from other tenants'."""
        return self.nvext.cache_salt or None

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling that an engine gets, once the number of tokens is known."""
        if self.unbounded_sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens: must not be above max_tokens, which is {max_tokens}", param="min_tokens"
            )
        return replace(self.unbounded_sampling, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat; the messages are plain JSON values, for the template to judge."""

    call: Call
    messages: Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A completion of a text or of token ids."""

    call: Call
    prompt: str | TokenBuffer


def parse_chat(scanned: ScannedBody, nvext: NvextReader = READER) -> ChatCall:
    """Return the chat call in a body; raise :class:`InvalidRequest` naming the field."""
    body = decode_body(_CHAT, scanned)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidRequest(
            "max_completion_tokens: give this or max_tokens, not both", param="max_completion_tokens"
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_completion_tokens or body.max_tokens
    call = call_of(body, nvext, max_tokens=max_tokens, field=field)
    return ChatCall(call, read_messages(scanned))


def parse_either(scanned: ScannedBody, nvext: NvextReader = READER) -> ChatCall | CompletionCall:
    """Return the call in a body of either route: ``messages`` make it a chat, ``prompt`` a completion."""
    if "prompt" not in scanned.fields:
        return parse_chat(scanned, nvext)
    if "messages" in scanned.fields:
        raise InvalidRequest("prompt: give this or messages, not both", param="prompt")
    return parse_completion(scanned, nvext)


def parse_completion(scanned: ScannedBody, nvext: NvextReader = READER) -> CompletionCall:
    """Return the completion call in a body; raise :class:`InvalidRequest` naming the field."""
    body = decode_body(_COMPLETION, scanned)
    max_tokens = body.max_tokens or COMPLETION_TOKENS_DEFAULT
    call = call_of(body, nvext, max_tokens=max_tokens, field="max_tokens")
    return CompletionCall(call, one_prompt(scanned))


def one_prompt(scanned: ScannedBody) -> str | TokenBuffer:
    """Return the one prompt of a body; raise :class:`InvalidRequest` where it has none, or several."""
    begin, end, _, _ = scanned.fields["prompt"]
    prompt = read_prompt(scanned.data, begin, end, at="prompt")
    if not prompt.is_only:
        raise InvalidRequest("prompt: one prompt a request, not several", param="prompt")
    if not prompt.content:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    return prompt.content


def call_of(body: GenerateBody, nvext: NvextReader, *, max_tokens: int | None, field: str) -> Call:
    """Return what a body asks for, whatever its route; raise :class:`InvalidRequest` naming the field."""
    refuse_fields(body)
    if body.n is not None and body.n > 1:
        raise InvalidRequest(f"n: one answer a request, not {body.n}", param="n")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format.type: only 'text', not {body.response_format.type!r}: the others need an "
            "engine that takes text, and the workers of this model take tokens",
            param="response_format.type",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only with stream: true", param="stream_options")
    if len(body.stop_token_ids or ()) > STOP_TOKENS_MAX:
        raise InvalidRequest(f"stop_token_ids: at most {STOP_TOKENS_MAX}", param="stop_token_ids")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Call(
        model=ModelName(body.model),
        stream=bool(body.stream),
        max_tokens=max_tokens,
        max_tokens_field=field,
        stops=stops,
        nvext=nvext.read(body.nvext, body.cache_salt),
        stream_options=body.stream_options or StreamOptions(),
        unbounded_sampling=Sampling(
            max_tokens=0,
            min_tokens=body.min_tokens or 0,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=-1 if body.top_k is None else body.top_k,
            seed=body.seed,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=tuple(body.stop_token_ids or ()),
        ),
    )


def pin_of(worker_id: int | None, dp_rank: int | None) -> Pin | None:
    """Return the worker, and the rank of it, that are requested; None when no worker is."""
    if worker_id is None:
        return None
    return Pin(WorkerId(worker_id), None if dp_rank is None else DpRank(dp_rank))
