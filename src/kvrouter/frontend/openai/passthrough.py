"""Passthrough calls: the body goes to the engine unchanged; only what routing needs is parsed.

The engine is the judge of everything else, fields that nobody here has heard of included.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName
from kvrouter.core.json import Unreadable, parsed_counted
from kvrouter.core.lax import UNKNOWN, Unknown, lax_bool, lax_int, lax_json, lax_texts
from kvrouter.core.requests import CallRoute, ClientCall, ClientForm, Sampling
from kvrouter.frontend.openai.body import (
    SALT_CHARS_MAX,
    MisplacedFields,
    NvExt,
    Prompt,
    ScannedBody,
    StreamOptions,
    read_prompt,
    refuse_misplaced_field,
)
from kvrouter.frontend.openai.parse import COMPLETION_TOKENS_DEFAULT, READER, Call, NvextReader
from kvrouter.text.model import stops_fit
from kvrouter.text.prompts.fields import PromptFields
from kvrouter.text.tokenizer import TOKEN_TEXT_BYTES


@dataclass(frozen=True, slots=True)
class PassthroughCall:
    """A call and its bytes. ``call`` holds the routing hints; its sampling is the engine's business."""

    call: Call
    prompt: Prompt | None
    """The first prompt, None where there is no text and no token id."""
    client_call: ClientCall
    chat: PromptFields | None = None
    """What a chat's prompt is made from; None where it is no chat, or nobody knows how it goes on."""
    unread_tokens: int = 0
    """How many tokens a prompt that is not read is taken to have."""
    is_partial: bool = False
    """Whether a field changes the prompt in a way that is not known here."""


READ_BYTES_MAX = 8 * 1024 * 1024
"""A longer field, as one with large images, goes to its engine unread, and the request to a worker by load:
to build objects of it takes other requests more time than routing gains.
"""

UNREAD_TOKENS_MAX = 8192
"""As many tokens such a field counts as at most: images have more bytes than tokens."""

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

_NULL = Raw(b"null")

UNREAD_BYTES_MAX = 64 * 1024
"""The longest body that is no JSON and goes to an engine, which says so in its own words."""


def parse_passthrough(
    route: CallRoute, model: ModelName, scanned: ScannedBody, reader: NvextReader = READER
) -> PassthroughCall:
    """Return the call for ``model`` in a body, whose fields are read as leniently as engines read them.

    Raises :class:`InvalidRequest` naming a field that is the router's to judge.
    """
    fields = LaxFields(scanned)
    for name in MisplacedFields.__struct_fields__:
        refuse_misplaced_field(name, fields.value(name))
    salt = fields.salt()
    nvext = reader.read(fields.raw("nvext"), salt)
    if nvext.token_data is not None:
        raise InvalidRequest(
            "nvext.token_data: the engines of this model take calls as clients wrote them, and tokenize them",
            param="nvext.token_data",
        )
    written = written_call(scanned, salt=salt, nvext=nvext)
    stops = lax_texts(fields.value("stop"))
    wanted = lax_int(fields.value("max_completion_tokens"))
    if wanted is None:
        wanted = lax_int(fields.value("max_tokens"))
    stream = lax_bool(fields.value("stream"))
    options = fields.stream_options()
    is_read = UNKNOWN not in (stops, wanted, stream, options)
    if wanted is None and route is CallRoute.COMPLETION:
        wanted = COMPLETION_TOKENS_DEFAULT
    stops = () if stops is UNKNOWN else stops
    is_placed_by_load = fields.has_unknown_salt(nvext)
    is_chat = route is CallRoute.CHAT
    special = lax_bool(fields.value("add_special_tokens"))
    changes = special not in (None, not is_chat) or any(
        fields.value(name) is not None for name in ("chat_template", "documents")
    )
    return PassthroughCall(
        Call(
            model=model,
            stream=stream is True,
            max_tokens=max(1, wanted) if isinstance(wanted, int) else None,
            max_tokens_field="max_tokens",
            stops=stops,
            nvext=nvext,
            stream_options=StreamOptions() if options is UNKNOWN else options,
            unbounded_sampling=Sampling(max_tokens=0),
        ),
        None if is_chat or is_placed_by_load else _first_prompt(scanned),
        ClientCall(
            route,
            written.data,
            stream=stream is True,
            resumable=is_read and _is_resumable(written.fields) and stops_fit(stops) and wanted != 0,
        ),
        chat_of(fields, route) if is_chat and not is_placed_by_load else None,
        unread_tokens=fields.unread_tokens(),
        is_partial=changes,
    )


def parse_unread(
    route: CallRoute, model: ModelName, data: bytes, reader: NvextReader = READER
) -> PassthroughCall:
    """Return a call whose body is no JSON object: its engine says so, and gets it byte for byte."""
    return PassthroughCall(
        passed_call_of(model, reader.read(_NULL, None), stream=False, max_tokens=1),
        None,
        ClientCall(
            route, data, stream=False, resumable=False, form=ClientForm("application/json", model_at=None)
        ),
    )


def is_surely_unreadable(data: bytes) -> bool:
    """Whether no engine finds a field in a body that is no JSON object here. Engines read with Python's own
    parser, which also takes NaN and UTF-16: there they could find fields that are the router's to say.
    """
    if len(data) > UNREAD_BYTES_MAX:
        return False
    try:
        return not isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return True


_SURROGATE = re.compile("[\ud800-\udfff]")


def as_utf8(data: bytes) -> bytes | None:
    """Return in UTF-8 a body that engines read and that is not: in UTF-16 or UTF-32, or with halves of
    surrogate pairs. None where it is, or is too long, or in none of these.
    """
    if len(data) > UNREAD_BYTES_MAX:
        return None
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
    except UnicodeDecodeError:
        return None
    written = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text).encode()
    return None if written == data else written


def passed_call_of(model: ModelName, nvext: NvExt, *, stream: bool, max_tokens: int | None) -> Call:
    """Return what is known of a call of which no more is known."""
    return Call(
        model=model,
        stream=stream,
        max_tokens=max_tokens,
        max_tokens_field="max_tokens",
        stops=(),
        nvext=nvext,
        stream_options=StreamOptions(),
        unbounded_sampling=Sampling(max_tokens=0),
    )


class LaxFields:
    """The fields of a body; one that cannot be read is unknown, and wrong is what its engine says."""

    def __init__(self, scanned: ScannedBody) -> None:
        self._scanned = scanned

    def raw(self, name: str) -> Raw:
        """The JSON of a field; null where it is absent."""
        raw = self._scanned.raw(name)
        return _NULL if raw is None else Raw(raw)

    def value(self, name: str) -> object:
        """The value of a field; None where it is absent or null. Nothing is built of one that is too long for
        routing to read: it is unknown.
        """
        raw = self._scanned.raw(name)
        return UNKNOWN if raw is not None and len(raw) > READ_BYTES_MAX else lax_json(raw)

    def salt(self) -> str | None:
        """``cache_salt``, None where it is absent, or no text. Raises :class:`InvalidRequest` for a text that
        is over our limit.
        """
        salt = self.value("cache_salt")
        if not isinstance(salt, str):
            return None
        if len(salt) > SALT_CHARS_MAX:
            raise InvalidRequest(f"cache_salt: at most {SALT_CHARS_MAX} characters", param="cache_salt")
        return salt

    def has_unknown_salt(self, nvext: NvExt) -> bool:
        """Whether the call names a salt that cannot be read, and ``nvext`` puts none in its place: then
        nothing can be known to be cached for it.
        """
        return not nvext.cache_salt and not isinstance(self.value("cache_salt"), str | None)

    def unread_tokens(self) -> int:
        """How many tokens a prompt is taken to have of which nothing is read: 0 where there is none."""
        lengths = (len(self._scanned.raw(name) or b"") for name in ("messages", "prompt", "input"))
        return min(max(lengths) // TOKEN_TEXT_BYTES, UNREAD_TOKENS_MAX)

    def stream_options(self) -> StreamOptions | Unknown:
        """``stream_options``."""
        options = self.value("stream_options")
        if options is None:
            return StreamOptions()
        if not isinstance(options, dict):
            return UNKNOWN
        usage, each = (lax_bool(options.get(name)) for name in ("include_usage", "continuous_usage_stats"))
        if usage is UNKNOWN or each is UNKNOWN:
            return UNKNOWN
        return StreamOptions(include_usage=bool(usage), continuous_usage_stats=bool(each))


def chat_of(fields: LaxFields, route: CallRoute) -> PromptFields | None:
    """Return what a chat's prompt is made from; None where a part of it cannot be read."""
    values = {name: fields.value(name) for name in PromptFields.__struct_fields__ if name != "route"}
    return None if UNKNOWN in values.values() else PromptFields(route=route, **values)


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
    """Of several prompts the first one is where the request goes; None where it cannot be read."""
    begin, end, _, _ = scanned.fields.get("prompt", (0, 0, 0, 0))
    if scanned.data[begin : begin + 1] not in (b'"', b"[") or end - begin > READ_BYTES_MAX:
        return None
    try:
        return read_prompt(scanned.data, begin, end, at="prompt")
    except InvalidRequest:
        return None  # the engine says what is wrong with it


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
        return parsed_counted(_OBJECT, raw)
    except Unreadable as error:
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
