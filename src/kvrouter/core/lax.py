"""Values of a client's JSON as engines read them: by pydantic's lax mode, which vLLM, SGLang and TensorRT-LLM
all use. ``"16"`` and ``16.0`` are the number 16, ``"on"`` and ``1`` are true.

A value that an engine refuses is :data:`UNKNOWN` here: routing does without it, and the engine says why.
"""

from enum import Enum
from typing import Final, TypeVar

import msgspec
from pydantic import TypeAdapter, ValidationError

from kvrouter.core.json import Unreadable, attempted


class Unknown(Enum):
    """The type of :data:`UNKNOWN`."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN
"""What stands for a value that cannot be read."""

Value = TypeVar("Value")

_BOOL: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_INT: TypeAdapter[int | None] = TypeAdapter(int | None)
_TEXTS: TypeAdapter[str | list[str] | None] = TypeAdapter(str | list[str] | None)


def lax_json(raw: bytes | memoryview | msgspec.Raw | None) -> object:
    """Return the value that JSON stands for, None where there is none; :data:`UNKNOWN` for what cannot be
    built: half a surrogate pair, a number beyond all floats.
    """
    if raw is None:
        return None
    try:
        return attempted(msgspec.json.decode, raw)
    except Unreadable:
        return UNKNOWN


def lax_bool(value: object) -> bool | Unknown | None:
    """Return a flag, None where it is not set."""
    return _read(_BOOL, value)


def lax_int(value: object) -> int | Unknown | None:
    """Return a whole number of any size and sign, None where it is not set."""
    return _read(_INT, value)


def lax_texts(value: object) -> tuple[str, ...] | Unknown:
    """Return the texts of a field that holds one or a list of them; none where it is not set."""
    read = _read(_TEXTS, value)
    if read is UNKNOWN:
        return UNKNOWN
    return (read,) if isinstance(read, str) else tuple(read or ())


def _read(adapter: "TypeAdapter[Value]", value: object) -> Value | Unknown:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return UNKNOWN
