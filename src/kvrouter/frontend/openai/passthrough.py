"""Passthrough calls: the body goes to the engine unchanged; only the fields that routing needs are parsed.

The engine validates everything else, also fields that the router does not know.
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
    """A passed-through call and its bytes. ``call`` has the routing hints; the engine reads the sampling."""

    call: Call
    prompt: Prompt | None
    """The first prompt; None if there is neither text nor token ids."""
    client_call: ClientCall
    chat: PromptFields | None = None
    """The fields of a chat's prompt; None for another call, or if the prompt cannot be known."""
    unread_tokens: int = 0
    """The estimated tokens of a prompt that is not read."""
    is_partial: bool = False
    """Whether a field changes the prompt in a way that the router does not know."""


READ_BYTES_MAX = 8 * 1024 * 1024
"""Longer fields, such as large images, are not decoded, and the request is routed by load: decoding would
delay other requests by more than routing gains.
"""

UNREAD_TOKENS_MAX = 8192
"""The most tokens that an unread field is estimated at: images have more bytes than tokens."""

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
"""Fields with which an answer stays plain text that depends only on the tokens before it."""

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
"""Values, besides null, with which other fields have no effect."""

_HARMLESS_BYTES_MAX = max(len(value) for values in _HARMLESS.values() for value in values)

_BETWEEN_ENGINES = (
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
"""Fields that tell engines where to fetch KV: hosts to connect to, and blocks of any tenant."""

_DECIDED_BY_ROUTER: Mapping[str, str] = {
    "extra_key": "keeps KV apart as the tenant's salt does, and is joined to it: use cache_salt",
    "session_params": "goes on from the KV of a session, which may be anybody's: send the whole conversation",
    "routed_dp_rank": "which rank serves is the router's to say: use nvext.dp_rank",
    "data_parallel_rank": "which rank serves is the router's to say: use nvext.dp_rank",
    "disagg_prefill_dp_rank": "which rank prefills is the router's to say: use nvext.prefill_dp_rank",
}
"""Other fields that the router decides, with the reason for the refusal and the alternative."""

ROUTERS_FIELDS = frozenset((*_BETWEEN_ENGINES, *_DECIDED_BY_ROUTER))
"""All fields that only the router may set."""

_EXTRA = "vllm_xargs"
"""vLLM takes ``kv_transfer_params`` from this field if a call has none."""

_OBJECT: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])

_NULL = Raw(b"null")

UNREAD_BYTES_MAX = 64 * 1024
"""The longest body that is not JSON and still goes to an engine, for the engine's own error."""


def parse_passthrough(
    route: CallRoute, model: ModelName, scanned: ScannedBody, reader: NvextReader = READER
) -> PassthroughCall:
    """Return the call for ``model`` in a body; fields are read as leniently as engines read them.

    Raises :class:`InvalidRequest` naming a field that the router validates.
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
    """Return a call whose body is not a JSON object; its engine gets it byte for byte, and refuses it."""
    return PassthroughCall(
        passed_call_of(model, reader.read(_NULL, None), stream=False, max_tokens=1),
        None,
        ClientCall(
            route, data, stream=False, resumable=False, form=ClientForm("application/json", model_at=None)
        ),
    )


def is_surely_unreadable(data: bytes) -> bool:
    """Whether engines surely find no JSON object in a body; False for a long one. They use Python's parser,
    which accepts NaN and UTF-16, and could find fields that only the router may set.
    """
    if len(data) > UNREAD_BYTES_MAX:
        return False
    try:
        return not isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return True


_SURROGATE = re.compile("[\ud800-\udfff]")


def as_utf8(data: bytes) -> bytes | None:
    """Return a body in UTF-16 or UTF-32, or with halves of surrogate pairs, as UTF-8. None if it is UTF-8
    already, too long, or in another encoding.
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
    """Return a call with only these fields known."""
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
    """The fields of a body; an unreadable one is ``UNKNOWN``, and its engine judges it."""

    def __init__(self, scanned: ScannedBody) -> None:
        self._scanned = scanned

    def raw(self, name: str) -> Raw:
        """Return the JSON of a field; ``null`` if it is absent."""
        raw = self._scanned.raw(name)
        return _NULL if raw is None else Raw(raw)

    def value(self, name: str) -> object:
        """Return the value of a field; None if absent or null, ``UNKNOWN`` if over ``READ_BYTES_MAX``."""
        raw = self._scanned.raw(name)
        return UNKNOWN if raw is not None and len(raw) > READ_BYTES_MAX else lax_json(raw)

    def salt(self) -> str | None:
        """Return ``cache_salt``; None unless it is a string. Raises :class:`InvalidRequest` for a too long
        one.
        """
        salt = self.value("cache_salt")
        if not isinstance(salt, str):
            return None
        if len(salt) > SALT_CHARS_MAX:
            raise InvalidRequest(f"cache_salt: at most {SALT_CHARS_MAX} characters", param="cache_salt")
        return salt

    def has_unknown_salt(self, nvext: NvExt) -> bool:
        """Whether the call has an unreadable salt that ``nvext`` does not replace: its cached blocks are then
        unknown.
        """
        return not nvext.cache_salt and not isinstance(self.value("cache_salt"), str | None)

    def unread_tokens(self) -> int:
        """Return the estimated tokens of an unread prompt; 0 without a prompt."""
        lengths = (len(self._scanned.raw(name) or b"") for name in ("messages", "prompt", "input"))
        return min(max(lengths) // TOKEN_TEXT_BYTES, UNREAD_TOKENS_MAX)

    def stream_options(self) -> StreamOptions | Unknown:
        """Return ``stream_options``, or ``UNKNOWN``."""
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
    """Return the fields of a chat's prompt; None if one of them cannot be read."""
    values = {name: fields.value(name) for name in PromptFields.__struct_fields__ if name != "route"}
    return None if UNKNOWN in values.values() else PromptFields(route=route, **values)


class WrittenCall(NamedTuple):
    """An engine's request body, as fields and as JSON."""

    fields: Mapping[str, Raw]
    data: bytes


def written_call(scanned: ScannedBody, *, salt: str | None, nvext: NvExt) -> WrittenCall:
    """Return the engine's body without ``nvext``; ``nvext.cache_salt`` replaces the body's own, ``salt``.
    Raises :class:`InvalidRequest` for a field that only the router may set.
    """
    data = scanned.data
    fields = {name: Raw(memoryview(data)[begin:end]) for name, (begin, end, _, _) in scanned.fields.items()}
    _refuse_between_engines(fields)
    for name, why in _DECIDED_BY_ROUTER.items():
        if _is_set(fields, name):
            raise InvalidRequest(f"{name}: {why}", param=name)
    written = {name: value for name, value in fields.items() if name != "nvext"}
    if nvext.cache_salt and nvext.cache_salt != salt:  # only the engine separates tenants
        written["cache_salt"] = Raw(msgspec.json.encode(nvext.cache_salt))
    return WrittenCall(written, data if written == fields else msgspec.json.encode(written))


def _first_prompt(scanned: ScannedBody) -> Prompt | None:
    """Return the first prompt, which decides the route; None if it cannot be read."""
    begin, end, _, _ = scanned.fields.get("prompt", (0, 0, 0, 0))
    if scanned.data[begin : begin + 1] not in (b'"', b"[") or end - begin > READ_BYTES_MAX:
        return None
    try:
        return read_prompt(scanned.data, begin, end, at="prompt")
    except InvalidRequest:
        return None  # the engine answers with the error


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
    """Return the fields of a JSON object; empty for any other value."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"{":
        return {}
    try:
        return parsed_counted(_OBJECT, raw)
    except Unreadable as error:
        raise InvalidRequest(f"{_EXTRA}: {error}", param=_EXTRA) from None


def _is_resumable(fields: Mapping[str, Raw]) -> bool:
    """Whether another worker can resume the answer without a visible difference."""
    for name, raw in fields.items():
        if name in _PLAIN:
            continue
        value = bytes(memoryview(raw)[: _HARMLESS_BYTES_MAX + 1])  # the value may be megabytes
        if value == b"null" or value in _HARMLESS.get(name, ()):
            continue
        if name == "seed" and bytes(fields.get("temperature", b"")) in (b"0", b"0.0"):
            continue
        return False
    return True
