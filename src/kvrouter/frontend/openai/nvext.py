"""``nvext`` as clients write it: fields under all their names, in the body and in headers, and what is not
known here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from kvrouter.config.problems import did_you_mean
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.openai.decode import named_error, read_token_ids, shown
from kvrouter.frontend.openai.routing_hints import check_wishes
from kvrouter.frontend.openai.schema import EXTRA_FIELDS, NvExt

QUERY = "query_instance_id"
"""The annotation of a call that only asks where it would go; Dynamo's clients write a colon after it."""

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
}
"""The field of ``nvext`` that a header sets. All begin with ``x-``; of two for one field the first wins."""

_PRIORITY = "requests have no priorities, and wait in one line"
_SESSION = "requests of one session are not kept together"

HEADERS_WITHOUT_EFFECT: Mapping[bytes, str] = {
    b"x-dynamo-request-priority": _PRIORITY,
    b"x-request-priority": _PRIORITY,
    b"x-dynamo-request-strict-priority": _PRIORITY,
    b"x-request-strict-priority": _PRIORITY,
    b"x-dynamo-meta-policy-class": _PRIORITY,
    b"x-dynamo-session-id": _SESSION,
}
"""Headers of Dynamo's that ask for what is not here: only the log says so, as HTTP asks for unknown headers.
"""

FIELDS_WITHOUT_EFFECT: Mapping[str, str] = {
    "agent_hints": _PRIORITY,
    "agent_context": "what a request belongs to is not traced",
    "session_control": _SESSION,
    "greed_sampling": "temperature 0 is greedy",
    "use_raw_prompt": "a completion's prompt gets no template",
    "max_thinking_tokens": "thinking has no limit of its own",
    "request_timestamp_ms": "the router's own clock counts",
    "allowed_worker_ids": "required taints say which workers may take a request",
    "router": "router_config_override changes the decision of one request",
}
"""Fields of Dynamo's that ask for what is not here."""

FIELDS_MAX = 64
"""Far more than there are: each unknown one is compared with all known ones, and logged."""

_NULL = Raw(b"null")
_KNOWN = frozenset(NvExt.__struct_fields__)
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_NVEXT = msgspec.json.Decoder(NvExt)
_NUMBER_DIGITS_MAX = 19
_UNSET_RANK = 2**32 - 1
"""What Dynamo's gateway plugin sends as the rank of a prefill worker that it has not chosen."""

_ALIASES = {"decode_worker_id": "worker_id", "backend_instance_id": "worker_id"}

Header = tuple[bytes, bytes]


def refuse_unknown(at: str, what: str) -> None:
    """Refuse what is not known."""
    raise InvalidRequest(f"{at}: {what}", param=at)


def ignore_silently(_at: str, _what: str) -> None:
    """Log nothing."""


@dataclass(frozen=True, slots=True)
class NvextReader:
    """Reads the routing hints of one call: ``nvext`` in its body, and headers.

    ``on_unknown`` is called with the place and the reason of each thing that is not known; when it returns,
    that is left out. ``on_header`` is called with headers that have no effect.
    """

    headers: Iterable[Header] = ()
    on_unknown: Callable[[str, str], None] = refuse_unknown
    on_header: Callable[[str, str], None] = ignore_silently

    def read(self, raw: Raw, cache_salt: str | None) -> NvExt:
        """Return the hints under one name each; ``cache_salt`` is the one outside ``nvext``, next to it.

        A header wins over the body. Raises :class:`InvalidRequest` naming the field, or both fields where two
        names of one hint differ in the body.
        """
        nvext = self._decoded(raw) if raw != _NULL else NvExt()
        hints = _BodyHints()
        for name in ("worker_id", "dp_rank", "prefill_worker_id", "prefill_dp_rank", "cache_salt"):
            hints.add(name, f"nvext.{name}", getattr(nvext, name))
        for alias, name in _ALIASES.items():
            hints.add(name, f"nvext.{alias}", getattr(nvext, alias))
        hints.add("cache_salt", "cache_salt", cache_salt)
        values = hints.values | self._header_values()
        if values or nvext.decode_worker_id is not None or nvext.backend_instance_id is not None:
            nvext = replace(nvext, **values, decode_worker_id=None, backend_instance_id=None)
        check_wishes(nvext)
        return nvext

    def _header_values(self) -> dict[str, object]:
        """The fields that headers set.

        Raises :class:`InvalidRequest` for a malformed header, and for one that is there twice and differs: a
        proxy that adds its own must not lose to the client's.
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
        for header, field in HEADERS.items():
            if sent.get(header) is not None:
                found.setdefault(field, sent[header])
        return found

    def _decoded(self, raw: Raw) -> NvExt:
        try:
            fields = _FIELDS.decode(raw)
            if len(fields) > FIELDS_MAX:
                raise InvalidRequest(f"nvext: at most {FIELDS_MAX} fields", param="nvext")
            for name in sorted(fields.keys() - _KNOWN):
                self.on_unknown(f"nvext.{shown(name)}", _why_unknown(name))
                del fields[name]
            token_data = fields.pop("token_data", _NULL)
            nvext = _NVEXT.decode(msgspec.json.encode(fields))
        except msgspec.ValidationError as error:
            raise named_error(str(error), at="nvext") from None
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"nvext: is not valid JSON: {error}", param="nvext") from None
        return replace(
            nvext,
            token_data=_token_data(token_data),
            extra_fields=self._known(nvext.extra_fields, EXTRA_FIELDS, "extra_fields"),
            annotations=self._known(nvext.annotations, (QUERY,), "annotations"),
        )

    def _known(self, words: tuple[str, ...], known: tuple[str, ...], field: str) -> tuple[str, ...]:
        """Return the words that are known; what follows a colon belongs to an annotation."""
        found = []
        for place, written in enumerate(words):
            word = written.partition(":")[0] if field == "annotations" else written
            if word in known:
                found.append(word)
            else:
                what = f"must be {' or '.join(known)}, not {shown(written)!r}"
                self.on_unknown(f"nvext.{field}[{place}]", what)
        return tuple(found)


class _BodyHints:
    """The hints of a body, by field, and the name that gave each one first."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self._named: dict[str, str] = {}

    def add(self, name: str, at: str, value: object) -> None:
        """Add one hint. Raises :class:`InvalidRequest` where it differs from one that was added."""
        if value is None or value == "":
            return
        if name not in self.values:
            self.values[name], self._named[name] = value, at
        elif self.values[name] != value:
            first = self._named[name]
            raise InvalidRequest(f"{at}: {first} says the same, and differs: leave one out", param=at)


def _header_value(header: bytes, value: bytes) -> int | str | None:
    """What a header sets its field to; None where it sets nothing."""
    field, name, text = HEADERS[header], header.decode(), value.decode("latin-1").strip()
    if field == "cache_salt":
        if len(text) > 1024:
            raise InvalidRequest(f"{name}: at most 1024 characters", param=name)
        return text or None
    limit = 2**63 if field.endswith("worker_id") else 2**31
    if text.isascii() and text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX:
        number = int(text)
        if number < limit:
            return number
        if field == "prefill_dp_rank" and number == _UNSET_RANK:
            return None
    raise InvalidRequest(f"{name}: must be a whole number below {limit}", param=name)


def _token_data(raw: Raw) -> TokenBuffer | None:
    if raw == _NULL:
        return None
    return read_token_ids(bytes(raw), 0, at="nvext.token_data")[0]


def _why_unknown(name: str) -> str:
    if name in FIELDS_WITHOUT_EFFECT:
        return f"has no effect here: {FIELDS_WITHOUT_EFFECT[name]}"
    return f"unknown field{did_you_mean(shown(name), NvExt.__struct_fields__)}"
