"""Edits of a client's JSON body that keep all other bytes as they were."""

import json
import re
from collections.abc import Mapping

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.json import Unreadable, bounds_of, decoded, parsed
from kvrouter.core.json_bounds import JsonRefused
from kvrouter.core.lax import UNKNOWN, Unknown, lax_bool, lax_json

Body = dict[str, msgspec.Raw]

_SHORT_BYTES = 8
"""No value that a field is compared with is as long."""

_decoder = msgspec.json.Decoder(Body)
_encoder = msgspec.json.Encoder()

_prompts = msgspec.json.Decoder(list[msgspec.Raw])

_LIST_OF_PROMPTS = re.compile(rb"\[\s*+[\[\"]")
"""A list of token ids is one prompt. It does not backtrack: a body may have megabytes of blanks here."""


def body_of(data: bytes) -> Body:
    """Return the fields of a call, each as it was written; raise InvalidRequest if it is no JSON object."""
    try:
        return parsed(_decoder, data)
    except Unreadable:
        return _scanned(data)


def _scanned(data: bytes) -> Body:
    """Return the fields of a body with half a surrogate pair, which no decoder takes; engines judge it."""
    try:
        fields, _ = bounds_of(Body).scan(data)
    except JsonRefused as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from error
    in_order = sorted(fields.items(), key=lambda field: field[1])  # a name's last value counts
    return {_meant(name): msgspec.Raw(data[begin:end]) for name, (begin, end, _, _) in in_order}


def _meant(name: str) -> str:
    """Return the name that the inside of a JSON string means; it may hold half a surrogate pair."""
    return str(json.loads(f'"{name}"')) if "\\" in name else name


def put(body: Body, **fields: object) -> None:
    """Set fields of a body."""
    for name, value in fields.items():
        body[name] = msgspec.Raw(_encoder.encode(value))


def put_inside(body: Body, name: str, **fields: object) -> None:
    """Set fields of the object that ``body`` holds under ``name``, or of a new one."""
    inner = _inner(body, name)
    put(inner, **fields)
    body[name] = msgspec.Raw(bytes_of(inner))


def drop_inside(body: Body, name: str, *fields: str) -> None:
    """Take fields out of the object that ``body`` holds under ``name``, where it is one and they are."""
    if _is_object(body, name):
        inner = _inner(body, name)
        if not inner.keys().isdisjoint(fields):
            drop(inner, *fields)
            body[name] = msgspec.Raw(bytes_of(inner))


_USAGE_ASKED = ("include_usage", "continuous_usage_stats")


def ask_usage(body: Body) -> bool:
    """Request the usage of a stream unless its client requests it; return whether that was added. The
    client's own ``stream_options``, valid or not, are left to the engine.
    """
    if any(flag_inside(body, "stream_options", name) not in (None, False) for name in _USAGE_ASKED):
        return False
    put_inside(body, "stream_options", include_usage=True)
    return True


def flag_inside(body: Body, name: str, field: str, *, default: bool | None = None) -> bool | Unknown | None:
    """Return the flag ``field`` of the object ``name`` in ``body``, ``default`` if the object has no such
    field; None if the object is null or missing, ``UNKNOWN`` for another type.
    """
    if not _is_object(body, name):
        return None if is_null(body, name) else UNKNOWN
    inner = _inner(body, name)
    return lax_bool(lax_json(inner[field])) if field in inner else default


def is_null(body: Body, name: str) -> bool:
    """Whether a field is absent or null."""
    return name not in body or bytes(memoryview(body[name])[:_SHORT_BYTES]) == b"null"


def has_several_answers(body: Body) -> bool:
    """Whether a call requests more than one answer: engines then write the usage's fields into each one's
    last event, and a later event could not be put back there.
    """
    return _is_list_of_prompts(body) or has_other_value(body, "n", b"1")


def has_several_prompts(body: Body) -> bool:
    """Whether a call holds more than one prompt."""
    return (
        _is_list_of_prompts(body)
        and len(decoded(_prompts, body["prompt"], "prompt", error=InvalidRequest)) > 1
    )


def has_other_value(body: Body, name: str, *values: bytes) -> bool:
    """Whether a field is present, not null and not written as one of ``values``: engines read more than one
    notation of a value, ``"2"`` for 2 and ``1`` for true.
    """
    return name in body and bytes(memoryview(body[name])[:_SHORT_BYTES]) not in (b"null", *values)


def _is_list_of_prompts(body: Body) -> bool:
    return _LIST_OF_PROMPTS.match(memoryview(body.get("prompt", b""))) is not None


def drop(body: Body, *names: str) -> None:
    """Take fields out, where they are."""
    for name in names:
        body.pop(name, None)


def bytes_of(body: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the JSON of a body."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:  # half a surrogate pair in a name
        fields = (json.dumps(name).encode() + b":" + bytes(value) for name, value in body.items())
        return b"{" + b",".join(fields) + b"}"


def names_model(body: Body) -> bool:
    """Whether a call names its model; a value that is no text, or empty, is judged by the engine."""
    begins = bytes(memoryview(body.get("model", b""))[:2])
    return begins[:1] == b'"' and begins != b'""'


def _is_object(body: Body, name: str) -> bool:
    return bytes(memoryview(body.get(name, b""))[:1]) == b"{"


def _inner(body: Body, name: str) -> Body:
    if is_null(body, name):
        return {}
    try:
        return body_of(bytes(body[name]))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: must be an object", param=name) from error
