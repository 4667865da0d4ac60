"""Reads values of a client's JSON as engines do: in pydantic's lax mode, which vLLM, SGLang and TensorRT-LLM
all use. ``"16"`` and ``16.0`` are the number 16, ``"on"`` and ``1`` are true.

A value that an engine would refuse is :data:`UNKNOWN`: routing ignores it, and the engine reports the error.
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
"""The result for a value that cannot be read."""

Value = TypeVar("Value")

_BOOL: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_INT: TypeAdapter[int | None] = TypeAdapter(int | None)
_TEXTS: TypeAdapter[str | list[str] | None] = TypeAdapter(str | list[str] | None)


def lax_json(raw: bytes | memoryview | msgspec.Raw | None) -> object:
    """Decode JSON; None for None, :data:`UNKNOWN` for a value that Python cannot represent: half a surrogate
    pair, a number beyond all floats.
    """
    if raw is None:
        return None
    try:
        return attempted(msgspec.json.decode, raw)
    except Unreadable:
        return UNKNOWN


def lax_bool(value: object) -> bool | Unknown | None:
    """Return a flag; None when it is not set."""
    return _read(_BOOL, value)


def lax_int(value: object) -> int | Unknown | None:
    """Return an integer of any size and sign; None when it is not set."""
    return _read(_INT, value)


def lax_texts(value: object) -> tuple[str, ...] | Unknown:
    """Return the strings of a field that holds one or a list of them; empty when it is not set."""
    read = _read(_TEXTS, value)
    if read is UNKNOWN:
        return UNKNOWN
    return (read,) if isinstance(read, str) else tuple(read or ())


def _read(adapter: "TypeAdapter[Value]", value: object) -> Value | Unknown:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return UNKNOWN
