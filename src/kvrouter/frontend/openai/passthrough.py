"""Passthrough calls: the body goes to the engine unchanged; only what routing needs is parsed.

The engine is the judge of everything else, fields that nobody here has heard of included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName
from kvrouter.core.requests import CallRoute, ClientCall, Sampling
from kvrouter.frontend.openai.body import (
    CacheSalt,
    MisplacedFields,
    Name,
    NonNegativeInt,
    NvExt,
    Prompt,
    ScannedBody,
    StreamOptions,
    decode_body,
    read_prompt,
    refuse_misplaced,
)
from kvrouter.frontend.openai.parse import COMPLETION_TOKENS_DEFAULT, READER, Call, NvextReader
from kvrouter.text.model import stops_fit
from kvrouter.text.prompts.fields import PromptFields


class PassthroughBody(MisplacedFields, frozen=True, kw_only=True):
    """What is read of a call."""

    model: Name
    messages: list[dict[str, object]] | UnsetType = UNSET
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NonNegativeInt | None = None
    max_completion_tokens: NonNegativeInt | None = None
    stop: str | list[str] | None = None
    cache_salt: CacheSalt | None = None
    nvext: Raw = Raw(b"null")
    tools: object = None
    tool_choice: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    documents: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    add_special_tokens: object = None
    reasoning_effort: object = None


@dataclass(frozen=True, slots=True)
class PassthroughCall:
    """A call and its bytes. ``call`` holds the routing hints; its sampling is the engine's business."""

    call: Call
    body: PassthroughBody
    prompt: Prompt | None
    """The first prompt, None where there is no text and no token id."""
    client_call: ClientCall
    chat: PromptFields | None = None
    """What a chat's prompt is made from; None where it is no chat, or nobody knows how it goes on."""


_BODY = msgspec.json.Decoder(PassthroughBody)

_PLAIN = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "cache_salt",
        "logit_bias",
        "user",
        "metadata",
        "store",
        "prompt_cache_key",
        "safety_identifier",
        "priority",
        "chat_template_kwargs",
    }
)
"""Fields with which an answer is plain text that depends on nothing but the tokens before."""

_HARMLESS: Mapping[str, Sequence[bytes]] = {
    "add_generation_prompt": (b"true",),
    "best_of": (b"1",),
    "echo": (b"false",),
    "frequency_penalty": (b"0", b"0.0"),
    "logprobs": (b"false",),
    "n": (b"1",),
    "parallel_tool_calls": (b"true", b"false"),
    "presence_penalty": (b"0", b"0.0"),
    "repetition_penalty": (b"1", b"1.0"),
    "response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    "tool_choice": (b'"none"', b'"auto"'),
    "tools": (b"[]",),
    "top_logprobs": (b"0",),
}
"""The values, apart from null, with which other fields change nothing."""

_HARMLESS_BYTES_MAX = max(len(value) for values in _HARMLESS.values() for value in values)

_BETWEEN_ENGINES = (
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
"""Fields that say where engines fetch KV: hosts that they connect to, and blocks that may be anybody's."""

_DECIDED_BY_ROUTER: Mapping[str, str] = {
    "extra_key": "keeps KV apart as the tenant's salt does, and is joined to it: use cache_salt",
    "session_params": "goes on from the KV of a session, which may be anybody's: send the whole conversation",
    "routed_dp_rank": "which rank serves is the router's to say: use nvext.dp_rank",
    "data_parallel_rank": "which rank serves is the router's to say: use nvext.dp_rank",
    "disagg_prefill_dp_rank": "which rank prefills is the router's to say: use nvext.prefill_dp_rank",
}
"""What else the router decides: why it is refused, and what a client has instead."""

ROUTERS_FIELDS = frozenset((*_BETWEEN_ENGINES, *_DECIDED_BY_ROUTER))
"""All that is the router's to say."""

_EXTRA = "vllm_xargs"
"""What vLLM takes ``kv_transfer_params`` from where a call has none."""

_OBJECT: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])


def parse_passthrough(
    route: CallRoute, scanned: ScannedBody, reader: NvextReader = READER
) -> PassthroughCall:
    """Return the call in a body; raise :class:`InvalidRequest` naming the field."""
    body = decode_body(_BODY, scanned)
    refuse_misplaced(body)
    if route is CallRoute.CHAT and not body.messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    nvext = reader.read(body.nvext, body.cache_salt)
    if nvext.token_data is not None:
        raise InvalidRequest(
            "nvext.token_data: the engines of this model take calls as clients wrote them, and tokenize them",
            param="nvext.token_data",
        )
    written = written_call(scanned, salt=body.cache_salt, nvext=nvext)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    default = COMPLETION_TOKENS_DEFAULT if route is CallRoute.COMPLETION else None
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return PassthroughCall(
        Call(
            model=ModelName(body.model),
            stream=bool(body.stream),
            max_tokens=default if wanted is None else max(1, wanted),
            max_tokens_field="max_tokens",
            stops=stops,
            nvext=nvext,
            stream_options=body.stream_options or StreamOptions(),
            unbounded_sampling=Sampling(max_tokens=0),
        ),
        body,
        _first_prompt(scanned) if body.messages is UNSET else None,
        ClientCall(
            route,
            written.data,
            stream=bool(body.stream),
            resumable=_is_resumable(written.fields) and stops_fit(stops) and wanted != 0,
        ),
        None if body.messages is UNSET else _prompt_fields(body),
    )


def _prompt_fields(body: PassthroughBody) -> PromptFields:
    return PromptFields(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        chat_template_kwargs=body.chat_template_kwargs,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        reasoning_effort=body.reasoning_effort,
    )


class WrittenCall(NamedTuple):
    """What an engine gets of a body: its fields, and the JSON of them."""

    fields: Mapping[str, Raw]
    data: bytes


def written_call(scanned: ScannedBody, *, salt: str | None, nvext: NvExt) -> WrittenCall:
    """Return a body without what is for the router alone, and with the salt that ``nvext`` asks for where
    ``salt`` is another. Raises :class:`InvalidRequest` naming a field that is the router's to say.
    """
    data = scanned.data
    fields = {name: Raw(memoryview(data)[begin:end]) for name, (begin, end, _, _) in scanned.fields.items()}
    _refuse_between_engines(fields)
    for name, why in _DECIDED_BY_ROUTER.items():
        if _is_set(fields, name):
            raise InvalidRequest(f"{name}: {why}", param=name)
    written = {name: value for name, value in fields.items() if name != "nvext"}
    if nvext.cache_salt and nvext.cache_salt != salt:  # the engine keeps tenants apart, or nobody
        written["cache_salt"] = Raw(msgspec.json.encode(nvext.cache_salt))
    return WrittenCall(written, data if written == fields else msgspec.json.encode(written))


def _first_prompt(scanned: ScannedBody) -> Prompt | None:
    """Of several prompts the first one is where the request goes."""
    begin, end, _, _ = scanned.fields.get("prompt", (0, 0, 0, 0))
    if scanned.data[begin : begin + 1] not in (b'"', b"["):
        return None
    return read_prompt(scanned.data, begin, end, at="prompt")


def _refuse_between_engines(fields: Mapping[str, Raw]) -> None:
    for at, held in (("", fields), (f"{_EXTRA}.", _fields_inside(fields.get(_EXTRA)))):
        for name in _BETWEEN_ENGINES:
            if _is_set(held, name):
                raise InvalidRequest(
                    f"{at}{name}: where KV is fetched from is the router's to say, not its clients'",
                    param=f"{at}{name}",
                )


def _is_set(fields: Mapping[str, Raw], name: str) -> bool:
    return name in fields and bytes(memoryview(fields[name])[:5]) != b"null"


def _fields_inside(raw: Raw | None) -> Mapping[str, Raw]:
    """The fields of an object; what is none has none."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"{":
        return {}
    try:
        return _OBJECT.decode(raw)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{_EXTRA}: {error}", param=_EXTRA) from None


def _is_resumable(fields: Mapping[str, Raw]) -> bool:
    """Whether another worker could go on with the answer and nobody would notice."""
    for name, raw in fields.items():
        if name in _PLAIN:
            continue
        value = bytes(memoryview(raw)[: _HARMLESS_BYTES_MAX + 1])  # the whole may be megabytes
        if value == b"null" or value in _HARMLESS.get(name, ()):
            continue
        if name == "seed" and bytes(fields.get("temperature", b"")) in (b"0", b"0.0"):
            continue
        return False
    return True
