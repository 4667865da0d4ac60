"""Parses a call from its body and headers: sampling, ``nvext`` and routing hints."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank, ModelName, Taint, WorkerId
from kvrouter.core.json import Unreadable, parsed_counted
from kvrouter.core.requests import DEFAULT_LEVEL, Sampling, ServiceLevel, TokenBuffer
from kvrouter.core.taints import named_domain, required_taints
from kvrouter.frontend.openai.body import (
    EXTRA_FIELDS,
    AgentHints,
    ChatBody,
    CompletionBody,
    GenerateBody,
    NvExt,
    ScannedBody,
    StreamOptions,
    decode_body,
    named_error,
    read_messages,
    read_prompt,
    read_token_ids,
    refuse_fields,
    shown,
)
from kvrouter.settings.problems import did_you_mean

TAINTS_MAX = 32
TAINT_CHARS_MAX = 512


def check_hints(nvext: NvExt, *, at: str = "nvext.") -> None:
    """Raise :class:`InvalidRequest` naming the field of an invalid hint, or of one that no worker can meet.

    ``at`` is the prefix of field names in errors. A taint may be both required and avoided (a negative
    preference).
    """
    constraints, override = nvext.routing_constraints, nvext.router_config_override
    required = f"{at}routing_constraints.required_taints"
    _check_taints(required, constraints.required_taints)
    _check_taints(f"{at}routing_constraints.preferred_taints", constraints.preferred_taints)
    decode = f"{at}routing_constraints.required_decode_taints"
    _check_taints(decode, constraints.required_decode_taints)
    _check_one_value_each(required, constraints.required_taints)
    _check_one_value_each(decode, required_taints(constraints, prefill=False))
    for field, number in (
        ("overlap_score_weight", override.overlap_score_weight),
        ("router_temperature", override.router_temperature),
    ):
        if number is not None and number < 0:
            raise _wrong(f"{at}router_config_override.{field}", f"must be 0 or more, not {number}")
    for rank_field, rank, worker_field, worker in (
        ("dp_rank", nvext.dp_rank, "worker_id", nvext.worker_id),
        ("prefill_dp_rank", nvext.prefill_dp_rank, "prefill_worker_id", nvext.prefill_worker_id),
    ):
        if rank is not None and worker is None:
            raise _wrong(f"{at}{rank_field}", f"only together with {at}{worker_field}")


def _check_taints(path: str, taints: Iterable[Taint]) -> None:
    for count, taint in enumerate(taints, start=1):
        if count > TAINTS_MAX:
            raise _wrong(path, f"at most {TAINTS_MAX} taints")
        if not taint.strip():
            raise _wrong(path, "a taint is empty")
        if len(taint) > TAINT_CHARS_MAX:
            raise _wrong(path, f"a taint has at most {TAINT_CHARS_MAX} characters")
        place = named_domain(taint)
        if place is not None and not all(place):
            raise _wrong(path, f"{taint!r} must name a domain and a value, as dynamo.topology/zone=a does")


def _check_one_value_each(path: str, required: Iterable[Taint]) -> None:
    """Refuse two required values of one domain: a worker has one value of each."""
    value_of: dict[str, str] = {}
    for taint in sorted(required):
        place = named_domain(taint)
        if place is None:
            continue
        domain, value = place
        other = value_of.setdefault(domain, value)
        if other != value:
            raise _wrong(path, f"no worker has two values of {domain!r}: {other!r} and {value!r} contradict")


def _wrong(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {why}", param=path)


QUERY = "query_instance_id"
"""The annotation of a routing query; Dynamo's clients write a colon after it."""

WORKER_HEADERS = (b"x-dynamo-worker-instance-id", b"x-worker-instance-id")
HEADERS: Mapping[bytes, str] = {
    **dict.fromkeys(WORKER_HEADERS, "worker_id"),
    b"x-dynamo-dp-rank": "dp_rank",
    b"x-dp-rank": "dp_rank",
    b"x-data-parallel-rank": "dp_rank",
    b"x-dynamo-prefill-instance-id": "prefill_worker_id",
    b"x-prefill-instance-id": "prefill_worker_id",
    b"x-dynamo-prefill-dp-rank": "prefill_dp_rank",
    b"x-prefill-dp-rank": "prefill_dp_rank",
    b"x-tenant-id": "cache_salt",
    b"x-dynamo-request-priority": "agent_hints.priority",
    b"x-request-priority": "agent_hints.priority",
    b"x-dynamo-request-strict-priority": "agent_hints.strict_priority",
    b"x-request-strict-priority": "agent_hints.strict_priority",
    b"x-slo-ttft-ms": "slo_ttft_ms",
}
"""The ``nvext`` field of each header; all begin with ``x-``. Of two for one field, the first here wins."""

_SESSION = "a session stays where its prompts are cached, under any name"

HEADERS_WITHOUT_EFFECT: Mapping[bytes, str] = {
    b"x-dynamo-meta-policy-class": "a request's class is its strict_priority",
    b"x-dynamo-session-id": _SESSION,
    b"x-dynamo-parent-session-id": _SESSION,
}
"""Headers of Dynamo's for unsupported features, with the reason. They are logged and ignored, as HTTP
requires for unknown headers.
"""

FIELDS_WITHOUT_EFFECT: Mapping[str, str] = {
    "agent_hints.osl": "max_tokens is the expected length of an answer",
    "agent_hints.latency_sensitivity": "use priority, in seconds",
    "agent_hints.speculative_prefill": "only prompts that were sent are prefilled",
    "agent_context": "what a request belongs to is not traced",
    "session_control": _SESSION,
    "greed_sampling": "temperature 0 is greedy",
    "use_raw_prompt": "a completion's prompt gets no template",
    "max_thinking_tokens": "thinking has no limit of its own",
    "request_timestamp_ms": "the router's own clock counts",
    "allowed_worker_ids": "required taints say which workers may take a request",
    "router": "router_config_override changes the decision of one request",
}
"""Fields of Dynamo's in ``nvext`` for unsupported features, with the reason."""

FIELDS_MAX = 64
"""The most fields of ``nvext``: each unknown one is compared with all known ones, and logged."""

EVERY_OTHER = "*"
"""The name of all tenants without a name of their own, and of requests without a tenant."""

NO_HINTS = NvExt()
"""The hints of a call without any."""

_NULL = Raw(b"null")
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_NVEXT = msgspec.json.Decoder(NvExt)
_NUMBER_DIGITS_MAX = 19
_RANGES: Mapping[str, tuple[int, int]] = {
    "worker_id": (0, 2**63),
    "prefill_worker_id": (0, 2**63),
    "agent_hints.priority": (-(2**31), 2**31),
    "agent_hints.strict_priority": (0, 2**32),
    "slo_ttft_ms": (1, 2**31),
}
"""The least value of a header's number, and one more than the largest; from 0 to 2³¹ of other fields."""

_UNSET_RANK = 2**32 - 1
"""The rank that Dynamo's gateway plugin sends for a prefill worker that it has not chosen."""

_ALIASES = {"decode_worker_id": "worker_id", "backend_instance_id": "worker_id"}

Header = tuple[bytes, bytes]


def refuse_unknown(at: str, why: str) -> None:
    """Raise :class:`InvalidRequest` for an unknown field or value."""
    raise InvalidRequest(f"{at}: {why}", param=at)


def ignore_silently(_at: str, _why: str) -> None:
    """Ignore a hint without logging it."""


class NvextReader(Struct, frozen=True):
    """Reads the routing hints of one call: ``nvext`` in its body, and headers.

    ``on_unknown`` is called with the path and the reason for each unknown field or value, which is ignored
    unless the callback raises. ``on_header`` is called with headers that have no effect. ``tenants`` are the
    priorities of each tenant, which replace those that a request states; those of ``*`` are for all others.
    """

    headers: Iterable[Header] = ()
    on_unknown: Callable[[str, str], None] = refuse_unknown
    on_header: Callable[[str, str], None] = ignore_silently
    tenants: Mapping[str, AgentHints] | None = None

    def read(self, raw: Raw, cache_salt: str | None) -> NvExt:
        """Return the hints, without aliases; ``cache_salt`` is the body's field next to ``nvext``.

        A call without any has :data:`NO_HINTS`. A header wins over the body. Raises :class:`InvalidRequest`
        naming the field, or both fields if two names of one hint differ in the body.
        """
        nvext, hints = NO_HINTS, _BodyHints()
        if raw != _NULL or cache_salt:
            nvext = self._decoded(raw) if raw != _NULL else NO_HINTS
            for name in ("worker_id", "dp_rank", "prefill_worker_id", "prefill_dp_rank", "cache_salt"):
                hints.add(name, f"nvext.{name}", getattr(nvext, name))
            for alias, name in _ALIASES.items():
                hints.add(name, f"nvext.{alias}", getattr(nvext, alias))
            hints.add("cache_salt", "cache_salt", cache_salt)
        values = hints.values | self._header_values()
        if values or nvext.decode_worker_id is not None or nvext.backend_instance_id is not None:
            values = _nested(values, nvext.agent_hints)
            nvext = replace(nvext, **values, decode_worker_id=None, backend_instance_id=None)
        if self.tenants is not None:
            hints_of_tenant = self.tenants.get(nvext.cache_salt or "", self.tenants.get(EVERY_OTHER))
            if hints_of_tenant is not None:
                nvext = replace(nvext, agent_hints=hints_of_tenant)
        if nvext is not NO_HINTS:
            check_hints(nvext)
        return nvext

    def _header_values(self) -> dict[str, object]:
        """Return the fields that headers set.

        Raises :class:`InvalidRequest` for a malformed header, and for a repeated one with different values:
        the client's must not win over a proxy's.
        """
        sent: dict[bytes, int | str | None] = {}
        for header, value in self.headers:
            if header in HEADERS:
                found_value = _header_value(header, value)
                if sent.setdefault(header, found_value) != found_value:
                    name = header.decode()
                    raise InvalidRequest(f"{name}: is there twice, and differs: leave one out", param=name)
            elif header in HEADERS_WITHOUT_EFFECT:
                self.on_header(header.decode(), f"has no effect here: {HEADERS_WITHOUT_EFFECT[header]}")
        found: dict[str, object] = {}
        if not sent:
            return found
        for header, field in HEADERS.items():
            if sent.get(header) is not None:
                found.setdefault(field, sent[header])
        return found

    def _decoded(self, raw: Raw) -> NvExt:
        try:
            fields = self._known_fields(raw, NvExt)
            hints = fields.get("agent_hints", _NULL)
            if bytes(memoryview(hints)[:1]) == b"{":
                known = self._known_fields(hints, AgentHints, "agent_hints.")
                fields["agent_hints"] = Raw(msgspec.json.encode(known))
            token_data = fields.pop("token_data", _NULL)
            nvext = parsed_counted(_NVEXT, msgspec.json.encode(fields))
        except Unreadable as error:
            if error.has_wrong_shape:
                raise named_error(str(error), at="nvext") from None
            raise InvalidRequest(f"nvext: is not valid JSON: {error}", param="nvext") from None
        return replace(
            nvext,
            token_data=_token_data(token_data),
            extra_fields=self._known(nvext.extra_fields, EXTRA_FIELDS, "extra_fields"),
            annotations=self._known(nvext.annotations, (QUERY,), "annotations"),
        )

    def _known_fields(self, raw: Raw, kind: type[Struct], at: str = "") -> dict[str, Raw]:
        """Return the fields of an object of this kind, without unknown ones; ``at`` is its path's prefix."""
        fields = parsed_counted(_FIELDS, raw)
        if len(fields) > FIELDS_MAX:
            place = f"nvext.{at}".rstrip(".")
            raise InvalidRequest(f"{place}: at most {FIELDS_MAX} fields", param=place)
        for name in sorted(fields.keys() - {*kind.__struct_fields__}):
            self.on_unknown(f"nvext.{at}{shown(name)}", _why_unknown(at, name, kind))
            del fields[name]
        return fields

    def _known(self, words: tuple[str, ...], known: tuple[str, ...], field: str) -> tuple[str, ...]:
        """Return the known words; of an annotation only the part before a colon counts."""
        found = []
        for place, written in enumerate(words):
            word = written.partition(":")[0] if field == "annotations" else written
            if word in known:
                found.append(word)
            else:
                why = f"must be {' or '.join(known)}, not {shown(written)!r}"
                self.on_unknown(f"nvext.{field}[{place}]", why)
        return tuple(found)


class _BodyHints:
    """The hints of a body by field, with the name under which each one was first found."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self._named: dict[str, str] = {}

    def add(self, name: str, at: str, value: object) -> None:
        """Add a hint. Raises :class:`InvalidRequest` if the field has another value already."""
        if value is None or value == "":
            return
        if name not in self.values:
            self.values[name], self._named[name] = value, at
        elif self.values[name] != value:
            first = self._named[name]
            raise InvalidRequest(f"{at}: {first} says the same, and differs: leave one out", param=at)


def _nested(values: dict[str, object], hints: AgentHints | None) -> dict[str, object]:
    """Return the fields of ``nvext`` for ``values`` by path; those of ``agent_hints`` change ``hints``."""
    stated = {
        name: values.pop(path)
        for name in AgentHints.__struct_fields__
        if (path := f"agent_hints.{name}") in values
    }
    return values | {"agent_hints": replace(hints or AgentHints(), **stated)} if stated else values


def _header_value(header: bytes, value: bytes) -> int | str | None:
    """Return the value that a header sets its field to; None for an unset value."""
    field, name, text = HEADERS[header], header.decode(), value.decode("latin-1").strip()
    if field == "cache_salt":
        if len(text) > 1024:
            raise InvalidRequest(f"{name}: at most 1024 characters", param=name)
        return text or None
    least, limit = _RANGES.get(field, (0, 2**31))
    digits = text.removeprefix("-") if least < 0 else text
    if digits.isascii() and digits.isdigit() and len(digits) <= _NUMBER_DIGITS_MAX:
        number = int(text)
        if least <= number < limit:
            return number
        if field == "prefill_dp_rank" and number == _UNSET_RANK:
            return None
    from_least = f" from {least}" if least else ""
    raise InvalidRequest(f"{name}: must be a whole number{from_least} below {limit}", param=name)


def _token_data(raw: Raw) -> TokenBuffer | None:
    if raw == _NULL:
        return None
    return read_token_ids(bytes(raw), 0, at="nvext.token_data")[0]


def _why_unknown(at: str, name: str, kind: type[Struct]) -> str:
    if at + name in FIELDS_WITHOUT_EFFECT:
        return f"has no effect here: {FIELDS_WITHOUT_EFFECT[at + name]}"
    return f"unknown field{did_you_mean(shown(name), kind.__struct_fields__)}"


_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)

STOP_TOKENS_MAX = 64
READER = NvextReader()
"""The reader of calls without headers; it refuses unknown fields."""

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for ``max_tokens`` of a completion."""


class Call(Struct, frozen=True, kw_only=True):
    """A parsed generation call of any route, which does not keep its body.

    ``max_tokens`` None allows up to the context length.
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
        """Routing settings for this request only."""
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
        """The salt that separates this request's KV blocks from other tenants'."""
        return self.nvext.cache_salt or None

    @property
    def service_level(self) -> ServiceLevel:
        """How urgent the request is."""
        hints, slo_ms = self.nvext.agent_hints, self.nvext.slo_ttft_ms
        if hints is None and slo_ms is None:
            return DEFAULT_LEVEL
        hints = hints or AgentHints()
        return ServiceLevel(
            strict_priority=hints.strict_priority or 0,
            priority_s=float(hints.priority or 0),
            ttft_slo_s=None if slo_ms is None else slo_ms / 1e3,
        )

    def sampling(self, max_tokens: int) -> Sampling:
        """Return an engine's sampling. Raises InvalidRequest when ``min_tokens`` is above ``max_tokens``."""
        if self.unbounded_sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens: must not be above max_tokens, which is {max_tokens}", param="min_tokens"
            )
        return replace(self.unbounded_sampling, max_tokens=max_tokens)


class ChatCall(Struct, frozen=True):
    """A chat; its messages are plain JSON values, which the template checks."""

    call: Call
    messages: Sequence[Mapping[str, object]]


class CompletionCall(Struct, frozen=True):
    """A completion of a text or of token ids."""

    call: Call
    prompt: str | TokenBuffer


def parse_chat(scanned: ScannedBody, nvext: NvextReader = READER, *, model: str = "") -> ChatCall:
    """Return the chat in a body, for ``model`` if it names none; raise :class:`InvalidRequest` naming the
    field.
    """
    body = decode_body(_CHAT, scanned)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidRequest(
            "max_completion_tokens: give this or max_tokens, not both", param="max_completion_tokens"
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_completion_tokens or body.max_tokens
    call = call_of(body, nvext, max_tokens=max_tokens, field=field, model=model)
    return ChatCall(call, read_messages(scanned))


def parse_either(
    scanned: ScannedBody, nvext: NvextReader = READER, *, model: str = ""
) -> ChatCall | CompletionCall:
    """Return the call in a body of either route: ``messages`` make it a chat, ``prompt`` a completion."""
    if "prompt" not in scanned.fields:
        return parse_chat(scanned, nvext, model=model)
    if "messages" in scanned.fields:
        raise InvalidRequest("prompt: give this or messages, not both", param="prompt")
    return parse_completion(scanned, nvext, model=model)


def parse_completion(scanned: ScannedBody, nvext: NvextReader = READER, *, model: str = "") -> CompletionCall:
    """Return the completion in a body, for ``model`` if it names none; raise as :func:`parse_chat` does."""
    body = decode_body(_COMPLETION, scanned)
    max_tokens = body.max_tokens or COMPLETION_TOKENS_DEFAULT
    call = call_of(body, nvext, max_tokens=max_tokens, field="max_tokens", model=model)
    return CompletionCall(call, one_prompt(scanned))


def one_prompt(scanned: ScannedBody) -> str | TokenBuffer:
    """Return a body's prompt; raise :class:`InvalidRequest` for a malformed, empty or second one."""
    begin, end, _, _ = scanned.fields["prompt"]
    prompt = read_prompt(scanned.data, begin, end, at="prompt")
    if not prompt.is_only:
        raise InvalidRequest("prompt: one prompt a request, not several", param="prompt")
    if not prompt.content:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    return prompt.content


def call_of(
    body: GenerateBody, nvext: NvextReader, *, max_tokens: int | None, field: str, model: str = ""
) -> Call:
    """Return the call in a body of any route, for ``model`` if it names none; raise :class:`InvalidRequest`
    naming the field.
    """
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
        model=ModelName(body.model or model),
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
    """Return the requested worker and rank; None without a worker."""
    if worker_id is None:
        return None
    return Pin(WorkerId(worker_id), None if dp_rank is None else DpRank(dp_rank))
