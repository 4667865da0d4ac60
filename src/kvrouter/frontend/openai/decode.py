"""From a body that was looked through to what it means, or to an error that names the field."""

import re
from typing import TypeVar

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.openai.scanned import ScannedBody

Body = TypeVar("Body")

SHOWN_CHARS_MAX = 300
"""What an error quotes of a body is cut here: a client knows what it sent."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]+)`")


def decode_body(decoder: "msgspec.json.Decoder[Body]", body: ScannedBody) -> Body:
    """Return what ``body`` means; raise :class:`InvalidRequest` with the field's path as ``param``."""
    try:
        return decoder.decode(body.data)
    except msgspec.ValidationError as error:
        raise named_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(shown(f"the body is not valid JSON: {error}")) from None


def named_error(message: str, *, at: str = "") -> InvalidRequest:
    """Turn msgspec's message, which ends in the path, into one that begins with it, below ``at``."""
    found = _PATH.search(message)
    below = found["path"] if found else ""
    path = f"{at}.{below}" if at and below and not below.startswith("[") else at + below
    what = message[: found.start()] if found else message
    for pattern in (_MISSING, _UNKNOWN):
        named = pattern.search(what)
        if named:
            path = f"{path}.{named['field']}" if path else named["field"]
    what, path = what[:1].lower() + what[1:], shown(path)
    return InvalidRequest(shown(f"{path}: {what}" if path else what), param=path or None)


def shown(text: str) -> str:
    """Return ``text`` short enough for an error, and without halves of surrogate pairs."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return cut.encode("utf-8", "replace").decode()
