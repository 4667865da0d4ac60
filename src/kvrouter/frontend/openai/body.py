"""The bodies of the OpenAI API: their schema, their scan within bounds, and their decoding.

A scan finds the fields of a body; each is decoded to typed values, or to an error that names it. Unsupported
fields that change the answer, or the place of its computation, are refused: if they were ignored, a client
would take text without its grammar for the requested one.

Messages and prompts, which are long, are decoded after the rest of a call was checked. Token ids are read
natively and stay packed: a million of them as Python objects would block the interpreter for 0.1 s, and take
ten times the memory.
"""

import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from kvrouter.api.cordon_schema import NAME_CHARS_MAX, Name
from kvrouter.api.health_schema import NonNegativeInt
from kvrouter.core.constraints import RouterConfigOverride, RoutingConstraints
from kvrouter.core.errors import InvalidRequest, UnknownModel
from kvrouter.core.json import Unreadable, parsed_counted
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX, JsonBounds, JsonRefused, token_ids
from kvrouter.core.lax import lax_json
from kvrouter.core.requests import TokenBuffer

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
WorkerNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, lt=2**31)]
SALT_CHARS_MAX = 1024
CacheSalt = Annotated[str, Meta(max_length=SALT_CHARS_MAX)]


WORDS_MAX = 64
"""The most extra fields, or annotations, of one request."""

EXTRA_FIELDS = ("worker_id", "timing")
"""The fields that an answer's ``nvext`` can report."""


class StreamOptions(Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class AgentHints(Struct, frozen=True, forbid_unknown_fields=True):
    """``nvext.agent_hints``: how urgent a request is, as in Dynamo. None: not stated, which counts as 0.

    ``strict_priority`` is its class: of waiting requests, those of the highest class go first. ``priority``
    is a head start within the class, in seconds.
    """

    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    strict_priority: Annotated[int, Meta(ge=0, lt=2**32)] | None = None


class NvExt(Struct, frozen=True, forbid_unknown_fields=True):
    """``nvext``: a request's routing hints, and the extra fields that its answer is to report."""

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
    """The prompt's token ids. They are decoded apart from the rest, see :class:`.parse.NvextReader`."""
    annotations: Annotated[tuple[str, ...], Meta(max_length=WORDS_MAX)] = ()
    agent_hints: AgentHints | None = None
    slo_ttft_ms: PositiveInt | None = None
    """The time to the first token, in milliseconds, within which the answer is of use."""

    @property
    def is_query(self) -> bool:
        """Whether the call is a routing query: it is decided and not sent."""
        return bool(self.annotations)


class ResponseFormat(Struct, frozen=True):
    """``response_format``."""

    type: Name


class MisplacedFields(Struct, frozen=True, kw_only=True):
    """Fields of ``nvext`` that a client put next to it; they are refused (:func:`refuse_misplaced`)."""

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
    """Fields that engines without text input cannot serve; they are refused (:func:`refuse_fields`)."""

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
    """The fields that chats and completions share."""

    model: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] | None = None
    """Absent or empty, the call is for the only served model."""
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
    """Decoded by :class:`.parse.NvextReader`."""


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Raw
    """Decoded by :func:`read_messages`."""
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Raw
    """Decoded by :func:`read_prompt`."""
    logprobs: int | None = None


DEPTH_MAX = 64
VALUES_MAX = 65_536
ITEMS_MAX = 8_192
NUMBERS_MIN = 262_144
"""The least limit of token ids, whatever the contexts are, so that an error can give their number."""

TEXT_BYTES_MAX = 16 * 1024 * 1024
SHORT_BYTES_MAX = 16_384
KEY_BYTES_MAX = 4_096
NUMBER_BYTES_MAX = 512
BLANKS_PER_NUMBER = 8
"""An indented list of token ids has about this many blanks before each."""

SHOWN_BYTES_MAX = 16
TOKEN_FIELDS = ("prompt", "token_ids", "nvext.token_data")
SHORT_FIELDS = ("nvext",)
"""Fields with short strings only."""

_NAME = msgspec.json.Decoder(str)


class NotJson(InvalidRequest):
    """The body is not JSON, or not an object."""


class NotFinite(InvalidRequest):
    """The body holds NaN or an infinity, which JSON lacks and Python's decoder accepts."""


class BodyOverBounds(InvalidRequest):
    """The body is JSON, but holds more than its bounds allow."""

    code = "body_over_bounds"

    def __init__(self, message: str, *, param: str | None, bound: str) -> None:
        super().__init__(message, param=param)
        self.bound = bound


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """The bounds of one body. The scan takes about a millisecond per megabyte, whatever the body holds."""

    depth: int = DEPTH_MAX
    """The deepest nesting of lists and objects."""
    values: int = VALUES_MAX
    """The most values of all kinds, except token ids."""
    items: int = ITEMS_MAX
    """The most elements of one list, except token ids, or fields of one object."""
    numbers: int = NUMBERS_MIN
    """The most token ids."""
    text_bytes: int = TEXT_BYTES_MAX
    """The most bytes of strings, as written or as Python holds them, whichever is more. Plain ASCII strings,
    such as images, do not count. Decoding a megabyte blocks the interpreter for some 3 ms, and one wide
    character makes all characters of its string take four bytes."""

    read_fields: frozenset[str] | None = None
    """The fields that are decoded, None: all. The others pass through; only their depth, names, numbers and
    blanks are bounded."""
    takes_nan: bool = False
    """Whether NaN and infinities are accepted."""

    @property
    def blanks(self) -> int:
        """The most blanks outside of strings: enough for an indented body with the most token ids."""
        return max(BLANKS_MAX, BLANKS_PER_NUMBER * self.numbers)


class ScannedBody(NamedTuple):
    """A body that is JSON within its bounds.

    ``fields`` has, for each field of the outermost object, its begin and end in ``data``, and the number of
    characters and of UTF-8 bytes of the strings in it.
    """

    data: bytes
    fields: Mapping[str, tuple[int, int, int, int]]

    def raw(self, field: str) -> memoryview | None:
        """Return the JSON of a field; None if it is absent."""
        found = self.fields.get(field)
        return None if found is None else memoryview(self.data)[found[0] : found[1]]


def scanned(data: bytes, bounds: BodyBounds) -> ScannedBody:
    """Scan a body natively, without the GIL if it is long. A byte order mark is dropped, as engines do.

    Raises :class:`InvalidRequest` with the field's path as ``param``, :class:`BodyOverBounds` for one that
    holds too much.
    """
    data = data.removeprefix(BOM_UTF8)
    try:
        fields, _ = _native(bounds).scan(data)
    except JsonRefused as refused:
        raise _refusal(refused, bounds, data) from None
    if not fields and data.lstrip()[:1] != b"{":
        raise NotJson("the body must be a JSON object")
    if "\\" in "".join(fields):
        # Of a field written twice, with different escapes, the last counts, as for the engine.
        in_order = sorted(fields.items(), key=itemgetter(1))
        fields = {_unescaped(name): span for name, span in in_order}
    return ScannedBody(data, fields)


def _unescaped(name: str) -> str:
    """Return the decoded name; a name with half a surrogate pair, which decoders refuse, unchanged."""
    try:
        return parsed_counted(_NAME, f'"{name}"'.encode())
    except Unreadable:
        return name


@lru_cache(maxsize=64)
def _native(bounds: BodyBounds) -> JsonBounds:
    return JsonBounds(
        depth=bounds.depth,
        values=bounds.values,
        items=bounds.items,
        numbers=bounds.numbers,
        text_bytes=bounds.text_bytes,
        short_bytes=SHORT_BYTES_MAX,
        key_bytes=KEY_BYTES_MAX,
        number_bytes=NUMBER_BYTES_MAX,
        blanks_in_row=BLANKS_IN_ROW_MAX,
        blanks=bounds.blanks,
        number_fields=TOKEN_FIELDS,
        short_fields=SHORT_FIELDS,
        read_fields=None if bounds.read_fields is None else [(name, True) for name in bounds.read_fields],
        takes_nan=bounds.takes_nan,
    )


def _refusal(refused: JsonRefused, bounds: BodyBounds, data: bytes) -> InvalidRequest:
    path = refused.path
    if refused.kind == "syntax":
        found = data[refused.at : refused.at + SHOWN_BYTES_MAX].decode("utf-8", "replace")
        where = f"at byte {refused.at}, {found!r}" if found else "at the end"
        return NotJson(f"the body is not valid JSON: {refused.what} ({where})")
    if refused.kind == "not_finite":
        problem = "must be a finite number"
        return NotFinite(f"{path}: {problem}" if path else problem, param=path or None)
    over = {
        "depth": f"more than {bounds.depth} lists and objects inside each other (KVROUTER_BODY_MAX_DEPTH)",
        "values": f"with it the body holds more than {bounds.values} values (KVROUTER_BODY_MAX_VALUES)",
        "items": f"more than {bounds.items} elements or fields (KVROUTER_BODY_MAX_ITEMS)",
        "numbers": f"more than {bounds.numbers} token ids (KVROUTER_BODY_MAX_TOKEN_IDS)",
        "text_bytes": f"more than {bounds.text_bytes} bytes of text (KVROUTER_BODY_MAX_TEXT_BYTES)",
        "short_bytes": f"a text is longer than {SHORT_BYTES_MAX} bytes",
        "key_bytes": f"a field's name is longer than {KEY_BYTES_MAX} bytes",
        "number_bytes": f"a number is longer than {NUMBER_BYTES_MAX} bytes",
        "blanks": f"with these the body holds more than {BLANKS_IN_ROW_MAX} blanks in a row, "
        f"or {bounds.blanks} in all",
    }[refused.kind]
    return BodyOverBounds(f"{path}: {over}" if path else over, param=path or None, bound=refused.kind)


Body = TypeVar("Body")

SHOWN_CHARS_MAX = 300
"""The most characters of a body that an error quotes."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]+)`")


def decode_body(decoder: "msgspec.json.Decoder[Body]", body: ScannedBody) -> Body:
    """Return the decoded ``body``; raise :class:`InvalidRequest` with the field's path as ``param``."""
    try:
        return parsed_counted(decoder, body.data)
    except Unreadable as error:
        if error.has_wrong_shape:
            raise named_error(str(error)) from None
        raise InvalidRequest(shown(f"the body is not valid JSON: {error}")) from None


def named_error(message: str, *, at: str = "") -> InvalidRequest:
    """Return an error from msgspec's message, with the path moved to the front and below ``at``."""
    found = _PATH.search(message)
    below = found["path"] if found else ""
    path = f"{at}.{below}" if at and below and not below.startswith("[") else at + below
    problem = message[: found.start()] if found else message
    for pattern in (_MISSING, _UNKNOWN):
        named = pattern.search(problem)
        if named:
            path = f"{path}.{named['field']}" if path else named["field"]
    problem, path = problem[:1].lower() + problem[1:], shown(path)
    return InvalidRequest(shown(f"{path}: {problem}" if path else problem), param=path or None)


def shown(text: str) -> str:
    """Return ``text`` shortened for an error, without halves of surrogate pairs."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return cut.encode("utf-8", "replace").decode()


_HARMLESS: Mapping[str, Sequence[object]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "modalities": ([], ["text"]),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Values, besides null, with which a field has no effect; ``auto`` without tools calls no tool."""

_HARMLESS_IN_CHAT: Mapping[str, Sequence[object]] = {"logprobs": (False,), "top_logprobs": (0,)}
_HARMLESS_IN_COMPLETION: Mapping[str, Sequence[object]] = {"logprobs": ()}
"""The number 0 is refused too: it asks for the log probability of each chosen token."""


_refused_fields = attrgetter(*RefusedFields.__struct_fields__)
_NO_REFUSED_FIELDS = (None,) * len(RefusedFields.__struct_fields__)


def refuse_fields(body: GenerateBody) -> None:
    """Raise :class:`InvalidRequest` naming the first misplaced or unsupported field."""
    if _refused_fields(body) != _NO_REFUSED_FIELDS:
        refuse_misplaced(body)
        _refuse(body, _HARMLESS)
    if isinstance(body, ChatBody):
        _refuse(body, _HARMLESS_IN_CHAT)
    elif isinstance(body, CompletionBody):
        _refuse(body, _HARMLESS_IN_COMPLETION)


def refuse_misplaced(body: MisplacedFields) -> None:
    """Raise :class:`InvalidRequest` naming the first field that belongs into ``nvext``."""
    for field in MisplacedFields.__struct_fields__:
        refuse_misplaced_field(field, getattr(body, field))


def refuse_misplaced_field(field: str, value: object) -> None:
    """Raise :class:`InvalidRequest` for a field of ``nvext`` that is set outside of it."""
    if value is not None:
        raise InvalidRequest(
            f"{field}: belongs into nvext, as nvext.{field}; elsewhere nothing reads it", param=field
        )


def _refuse(body: GenerateBody, harmless: Mapping[str, Sequence[object]]) -> None:
    for field, values in harmless.items():
        value = getattr(body, field)
        if value is None or value in values:
            continue
        if field == "best_of":
            raise InvalidRequest(f"{field}: one answer a request, not {value}", param=field)
        raise InvalidRequest(
            f"{field}: needs an engine that takes text; the workers of this model take tokens", param=field
        )


Content = TypeVar("Content")

_MESSAGES = msgspec.json.Decoder(list[dict[str, object]])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_LIST = re.compile(rb"\[\s*+(?P<inner>\[\s*+)?+(?P<first>[^\s\[])")
_END = re.compile(rb"\s*+\]")


class Prompt(NamedTuple):
    """The first prompt of a field; ``is_only`` if the field has no other."""

    content: str | TokenBuffer
    is_only: bool = True


def read_messages(body: ScannedBody) -> list[dict[str, object]]:
    """Return the messages of a body; raise :class:`InvalidRequest` naming the wrong part."""
    begin, end, _, _ = body.fields["messages"]
    messages = _decoded(_MESSAGES, memoryview(body.data)[begin:end], "messages")
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    return messages


def read_prompt(data: bytes, begin: int, end: int, *, at: str) -> Prompt:
    """Return the first prompt of the field ``at``, in any of OpenAI's four forms; ``data`` is JSON from
    ``begin`` to ``end``.

    Raises :class:`InvalidRequest` naming the field, or an element of it.
    """
    written = _LIST.match(data, begin, end)
    if written is None:
        return Prompt(_decoded(_TEXT, memoryview(data)[begin:end], at))
    first = written["first"]
    if written["inner"]:
        content, list_end = read_token_ids(data, written.start("inner"), at=f"{at}[0]")
        return Prompt(content, is_only=_END.match(data, list_end) is not None)
    if first == b'"':
        texts = _decoded(_TEXTS, memoryview(data)[begin:end], at)
        return Prompt(texts[0], is_only=len(texts) == 1)
    return Prompt(read_token_ids(data, begin, at=at)[0])


def read_token_ids(data: bytes, begin: int, *, at: str) -> tuple[TokenBuffer, int]:
    """Return the token ids of the JSON list that begins at ``begin``, and the list's end.

    Raises :class:`InvalidRequest` naming the element of the field ``at`` that is not a token id.
    """
    try:
        packed, end = token_ids(data, begin)
    except JsonRefused as refused:
        if data[refused.at : refused.at + 1] in (b'"', b"["):
            raise InvalidRequest(f"{at}: either token ids or texts, not both", param=at) from None
        at += refused.path
        raise InvalidRequest(f"{at}: token ids are whole numbers from 0 to {2**32 - 1}", param=at) from None
    ids = array("I")
    ids.frombytes(packed)
    return ids, end


def _decoded(decoder: "msgspec.json.Decoder[Content]", data: memoryview, at: str) -> "Content":
    try:
        return parsed_counted(decoder, data)
    except Unreadable as error:
        raise named_error(str(error), at=at) from None


_NAME_BYTES_MAX = 4_096
"""More than the longest model name takes with any JSON escapes."""


def named_model(scanned: ScannedBody) -> str | None:
    """Return the model that a body names; None for an absent, null, empty or non-string one: engines treat
    those alike, or refuse them. Raises :class:`UnknownModel` for a too long name.
    """
    raw = scanned.raw("model")
    if raw is not None and len(raw) > _NAME_BYTES_MAX:
        raise UnknownModel("model: far too long for a name", param="model")
    name = lax_json(raw)
    if not isinstance(name, str) or not name:
        return None
    if len(name) > NAME_CHARS_MAX:
        raise UnknownModel(f"model: no name has more than {NAME_CHARS_MAX} characters", param="model")
    return name
