"""Bounded decoding of JSON and msgpack from clients, engines, other processes and files.

A few bytes of JSON, or one of msgpack, become an object of a hundred bytes. Before any object is built, the
native core therefore counts the objects that a long text or frame would become, and refuses one that exceeds
its bounds. A short one is not counted: its length alone keeps the number of objects below the bounds.

Every failure of a decoder is caught in this module only.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json_bounds import JsonBounds, JsonRefused, MsgpackBounds

CONTAINERS_MAX = 16_384
"""The most lists and objects of one text. Each becomes an object of some hundred bytes."""

VALUES_MAX = 262_144
"""The most values of one text, which allows the token ids of the longest answer."""

DEPTH_MAX = 512
TEXT_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes of strings that are not plain ASCII, encoded or in Python's memory, whichever is more."""

BLANKS_MAX = 16 * 1024 * 1024
"""The most blanks outside of strings: a frontend accepts an indented body with millions of token ids."""

FLEET_TIMES = 64
"""The factor on the bounds for the state of a fleet of 16,384 workers, which commands read."""

UNSCANNED_BYTES = 3 * CONTAINERS_MAX
"""A shorter text cannot hold more lists, objects or values than the bounds allow: ``[],`` has three bytes."""

OFF_LOOP_BYTES = 1024 * 1024
"""From this length on, decoding takes milliseconds: an event loop runs it in a thread."""

FRAME_CONTAINERS_MAX = 8 * CONTAINERS_MAX
FRAME_VALUES_MAX = 2 * VALUES_MAX
"""The limits of one msgpack frame between processes, which carries the chunks of many streams."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Source = TypeVar("Source")

Data = bytes | memoryview | msgspec.Raw


@lru_cache(maxsize=256)
def bounds_of(kind: object, times: int = 1) -> JsonBounds:
    """Return the bounds of a text decoded as type ``kind``, times ``times``; only values that become objects
    count.
    """
    fields: dict[str, bool] = {}
    depth, is_free = _read(msgspec.inspect.type_info(kind), fields, ())
    return JsonBounds(
        depth=DEPTH_MAX,
        values=VALUES_MAX * times,
        items=VALUES_MAX * times,
        containers=CONTAINERS_MAX * times,
        numbers=0,
        text_bytes=TEXT_BYTES_MAX,
        short_bytes=0,
        key_bytes=4_096,
        number_bytes=512,
        blanks_in_row=BLANKS_MAX,
        blanks=BLANKS_MAX,
        number_fields=(),
        short_fields=(),
        read_fields=None if is_free else tuple(fields.items()),
        read_depth=depth,
        takes_nan=True,  # the decoder refuses NaN in fields that it reads
    )


_ANY_DEPTH = 2**32

_OBJECTS = (
    msgspec.inspect.StructType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.NamedTupleType,
)
_LISTS = (msgspec.inspect.CollectionType, msgspec.inspect.TupleType)


def _read(kind: msgspec.inspect.Type, fields: dict[str, bool], around: tuple[type, ...]) -> tuple[int, bool]:
    """Return a type's depth in containers, and whether it reads arbitrary field names. Add its named fields
    to ``fields``, each with whether arbitrary names are read inside.
    """
    if isinstance(kind, _OBJECTS) and kind.cls not in around:
        depth = 0
        for field in kind.fields:
            if _is_raw(field.type):
                continue  # one object, whatever its content
            inner, is_free = _read(field.type, fields, (*around, kind.cls))
            fields[field.encode_name] = is_free or fields.get(field.encode_name, False)
            depth = max(depth, inner)
        return depth + 1, False
    if isinstance(kind, msgspec.inspect.DictType):
        return 1 + _read(kind.value_type, fields, around)[0], True
    if isinstance(kind, msgspec.inspect.UnionType):
        return _widest(kind.types, fields, around)
    if isinstance(kind, _LISTS):
        inside = kind.item_types if isinstance(kind, msgspec.inspect.TupleType) else (kind.item_type,)
        depth, is_free = _widest(inside, fields, around)
        return depth + 1, is_free
    if isinstance(kind, (*_OBJECTS, msgspec.inspect.AnyType, msgspec.inspect.CustomType)):
        return _ANY_DEPTH, True
    return 0, False


def _is_raw(kind: msgspec.inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.RawType) for each in kinds)


def _widest(
    kinds: Sequence[msgspec.inspect.Type], fields: dict[str, bool], around: tuple[type, ...]
) -> tuple[int, bool]:
    found = [_read(kind, fields, around) for kind in kinds]
    return max((depth for depth, _ in found), default=0), any(is_free for _, is_free in found)


_OVER = {
    "depth": f"more than {DEPTH_MAX} lists and objects inside each other",
    "values": "more values than are read",
    "items": "more elements or fields than are read",
    "containers": "more lists and objects than are read",
    "text_bytes": "more text than is read",
    "key_bytes": "a field's name is too long",
    "number_bytes": "a number is too long",
    "blanks": "more blanks than are read",
}


class Unreadable(ValueError):
    """Bytes that cannot be decoded. ``has_wrong_shape``: they are well formed, but do not match the type."""

    def __init__(self, message: str, *, has_wrong_shape: bool = False) -> None:
        super().__init__(message)
        self.has_wrong_shape = has_wrong_shape


class Decoder(Protocol[T_co]):
    """A msgspec decoder of one type."""

    @property
    def type(self) -> object:
        """The decoded type."""

    def decode(self, data: Data, /) -> T_co:
        """Decode ``data``."""


class MakesError(Protocol):
    """An error class that names a field, or a function that makes such an error."""

    def __call__(self, message: str, *, param: str | None) -> Exception:
        """Return the error."""


def decoded(
    decoder: Decoder[T], data: Data, what: str, *, param: str | None = None, error: MakesError = ProtocolError
) -> T:
    """Decode JSON. Raises ``error`` with a message that begins with ``what``, and ``param``, by default
    ``what``.
    """
    try:
        return parsed(decoder, data)
    except Unreadable as unreadable:
        raise error(f"{what}: {unreadable}", param=param or what) from unreadable


def parsed(decoder: Decoder[T], data: Data, *, times: int = 1) -> T:
    """Decode JSON within ``times`` the bounds; raise :class:`Unreadable`."""
    try:
        if len(data) > UNSCANNED_BYTES:
            bounds_of(decoder.type, times).scan(bytes(data))
        return decoder.decode(data)
    except _FAILURES as error:
        raise _unreadable(error) from error


def parsed_counted(decoder: Decoder[T], data: Data) -> T:
    """Decode JSON that was scanned before; raise :class:`Unreadable`."""
    return attempted(decoder.decode, data)


def attempted(decode: Callable[[Source], T], data: Source) -> T:
    """Call a msgspec function with bounded ``data`` and return its result; raise :class:`Unreadable`."""
    try:
        return decode(data)
    except _FAILURES as error:
        raise _unreadable(error) from error


@lru_cache(maxsize=16)
def _frame_bounds(times: int) -> MsgpackBounds:
    values, containers = FRAME_VALUES_MAX * times, FRAME_CONTAINERS_MAX * times
    return MsgpackBounds(depth=DEPTH_MAX, values=values, containers=containers)


def unpacked(
    decoder: Decoder[T], frame: Data, what: str, *, times: int = 1, error: MakesError = ProtocolError
) -> T:
    """Decode msgpack within ``times`` the bounds; raise as :func:`decoded` does."""
    try:  # as unpack does, without a call of it: this runs for every frame of every session
        if len(frame) > FRAME_CONTAINERS_MAX * times:
            _frame_bounds(times).scan(bytes(frame))
        return decoder.decode(frame)
    except _FAILURES as failure:
        raise error(f"{what}: {_unreadable(failure)}", param=what) from failure


def unpack(decoder: Decoder[T], frame: Data, *, times: int = 1) -> T:
    """Decode msgpack within ``times`` the bounds; raise :class:`Unreadable`."""
    try:
        if len(frame) > FRAME_CONTAINERS_MAX * times:
            _frame_bounds(times).scan(bytes(frame))
        return decoder.decode(frame)
    except _FAILURES as failure:
        raise _unreadable(failure) from failure


def converted(content: object, kind: type[T]) -> T:
    """Convert decoded builtin objects to type ``kind``; raise :class:`Unreadable`."""
    try:
        return msgspec.convert(content, kind)
    except _FAILURES as error:
        raise _unreadable(error) from error


_FAILURES = (ValueError, RecursionError, OverflowError)
"""msgspec's own errors, those of UTF-8 and :class:`JsonRefused` are ValueErrors."""


def _unreadable(error: Exception) -> Unreadable:
    if not isinstance(error, JsonRefused):
        return Unreadable(str(error), has_wrong_shape=isinstance(error, msgspec.ValidationError))
    what = _OVER.get(error.kind) or f"no JSON at byte {error.at}: {error.what}"
    return Unreadable(f"{error.path}: {what}" if error.path else what)
