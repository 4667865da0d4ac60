"""The bodies of OpenAI's two generation routes, with the extensions that vLLM's and Dynamo's users send.

Unknown fields of the body are left alone, as OpenAI's own clients expect; unknown fields of ``nvext`` are
refused: a misspelt taint would cross a boundary in silence.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.constraints import RouterConfigOverride, RoutingConstraints

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Seed = Annotated[int, Meta(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
WorkerNumber = Annotated[int, Meta(ge=0, lt=2**63)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class StreamOptions(Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class NvExt(Struct, frozen=True, forbid_unknown_fields=True):
    """``nvext``: what a request asks of routing, and what it wants to know about it."""

    routing_constraints: RoutingConstraints = RoutingConstraints()
    router_config_override: RouterConfigOverride = RouterConfigOverride()
    worker_id: WorkerNumber | None = None
    dp_rank: NonNegativeInt | None = None
    prefill_worker_id: WorkerNumber | None = None
    prefill_dp_rank: NonNegativeInt | None = None
    cache_salt: str | None = None
    extra_fields: tuple[Literal["worker_id", "timing"], ...] = ()


class ResponseFormat(Struct, frozen=True):
    """``response_format``."""

    type: str


class GenerateBody(Struct, frozen=True, kw_only=True):
    """What both routes share."""

    model: str
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    n: PositiveInt | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    nvext: NvExt | None = None


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, msgspec.Raw]]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw | None = None


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
