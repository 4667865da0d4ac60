"""From bytes to a body, or to an error that names the field."""

import json
import math
import re
from typing import TypeVar

import msgspec

from kvrouter.core.errors import InvalidRequest

Body = TypeVar("Body")

SHOWN_CHARS_MAX = 300
"""What an error quotes of a body is cut here: a client knows what it sent."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]+)`")


def decode_body(decoder: "msgspec.json.Decoder[Body]", data: bytes) -> Body:
    """Return the body; raise :class:`InvalidRequest` with the field's path as ``param``."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise named_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        path = _not_finite(data)
        if path is not None:
            raise InvalidRequest(f"{path}: must be a finite number", param=path) from None
        raise InvalidRequest(shown(f"the body is not valid JSON: {error}")) from None


def named_error(message: str, *, at: str = "") -> InvalidRequest:
    """Turn msgspec's message, which ends in the path, into one that begins with it, below ``at``."""
    found = _PATH.search(message)
    path = ".".join(part for part in (at, found["path"] if found else "") if part)
    what = message[: found.start()] if found else message
    for pattern in (_MISSING, _UNKNOWN):
        named = pattern.search(what)
        if named:
            path = f"{path}.{named['field']}" if path else named["field"]
    what, path = what[:1].lower() + what[1:], shown(path)
    return InvalidRequest(shown(f"{path}: {what}" if path else what), param=path or None)


def _not_finite(data: bytes) -> str | None:
    """The path of a NaN or infinity, which JSON does not have and careless clients send; None without one."""
    if b"NaN" not in data and b"Infinity" not in data:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    todo: list[tuple[str, object]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return shown(path)
        if isinstance(item, dict):
            todo.extend((f"{path}.{key}" if path else str(key), inner) for key, inner in item.items())
        elif isinstance(item, list):
            todo.extend((f"{path}[{index}]", inner) for index, inner in enumerate(item))
    return None


def shown(text: str) -> str:
    """Return ``text`` short enough for an error, and without halves of surrogate pairs."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return cut.encode("utf-8", "replace").decode()
