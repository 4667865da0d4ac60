"""The bodies of OpenAI's two generation routes, with the extensions that vLLM's and Dynamo's users send.

Unknown fields of the body are left alone, as OpenAI's own clients expect; unknown fields of ``nvext`` are
refused, unless a setting says otherwise: a misspelt taint would cross a boundary in silence. Fields that are
known in order to be refused are in :class:`RefusedFields`.
"""

from typing import Annotated

from msgspec import Meta, Raw, Struct

from kvrouter.core.constraints import RouterConfigOverride, RoutingConstraints
from kvrouter.core.requests import TokenBuffer

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
WorkerNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, lt=2**31)]
NonNegativeInt = Annotated[int, Meta(ge=0, lt=2**31)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
CacheSalt = Annotated[str, Meta(max_length=1024)]


WORDS_MAX = 64
"""How many extra fields, or annotations, one request may name."""

EXTRA_FIELDS = ("worker_id", "timing")
"""What an answer's own ``nvext`` can report."""


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
    cache_salt: CacheSalt | None = None
    extra_fields: Annotated[tuple[str, ...], Meta(max_length=WORDS_MAX)] = ()
    decode_worker_id: WorkerNumber | None = None
    """As ``worker_id``."""
    backend_instance_id: WorkerNumber | None = None
    """As ``worker_id``."""
    token_data: TokenBuffer | None = None
    """The prompt, tokenized already. Not decoded with the rest, see :mod:`.nvext`."""
    annotations: Annotated[tuple[str, ...], Meta(max_length=WORDS_MAX)] = ()

    @property
    def asks_only(self) -> bool:
        """Whether the call is not to be sent: it asks where it would go."""
        return bool(self.annotations)


class ResponseFormat(Struct, frozen=True):
    """``response_format``."""

    type: Name


class MisplacedFields(Struct, frozen=True, kw_only=True):
    """Fields of ``nvext``, placed next to it: nothing would read them there; see :mod:`.refused`."""

    routing_constraints: object = None
    router_config_override: object = None
    worker_id: object = None
    dp_rank: object = None
    prefill_worker_id: object = None
    prefill_dp_rank: object = None
    decode_worker_id: object = None
    backend_instance_id: object = None
    token_data: object = None
    extra_fields: object = None


class RefusedFields(MisplacedFields, frozen=True, kw_only=True):
    """Fields that ask for what an engine that takes tokens does not have; see :mod:`.refused`."""

    audio: object = None
    best_of: PositiveInt | None = None
    echo: bool | None = None
    function_call: object = None
    functions: list[object] | None = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    logit_bias: dict[str, float] | None = None
    modalities: list[object] | None = None
    prompt_logprobs: object = None
    structured_outputs: object = None
    suffix: str | None = None
    tool_choice: object = None
    tools: list[object] | None = None


class GenerateBody(RefusedFields, frozen=True, kw_only=True):
    """What both routes share."""

    model: Name
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
    response_format: ResponseFormat | None = None
    cache_salt: CacheSalt | None = None
    nvext: Raw = Raw(b"null")
    """See :mod:`.nvext`."""


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Raw
    """See :mod:`.prompts`."""
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Raw
    """See :mod:`.prompts`."""
    logprobs: int | None = None
