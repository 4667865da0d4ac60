"""A batch in msgpack: ``[ts, events, dp_rank]``, each event an array with its type first, or a map with one.

Which fields an event has is each engine's own: it hands in a struct for maps and one for arrays.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import DpRank
from kvrouter.engines.customs.words import (
    EVENTS_MAX,
    PAYLOAD_BYTES_MAX,
    EngineBatch,
    EngineEvent,
    EngineSkipped,
    Skipped,
)

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

WireT = TypeVar("WireT", bound=msgspec.Struct)
_T_co = TypeVar("_T_co", covariant=True)

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_FIRST_INDEX = re.compile(r"^\[(\d+)\]")


class Shape(Protocol):
    """One type of event, as an engine writes it."""

    def read(self, raw: msgspec.Raw, where: str, *, is_array: bool) -> EngineEvent:
        """Decode one event, which stands at ``where`` in its batch. Raises ProtocolError."""


class EventShape(Generic[WireT]):
    """One type of event: its struct as a map and as an array, and how it becomes a word.

    ``word`` gets the struct and where it stands in the batch, for the errors that it raises.
    """

    def __init__(
        self, *, as_map: type[WireT], as_array: type[WireT], word: Callable[[WireT, str], EngineEvent]
    ) -> None:
        self._map = msgspec.msgpack.Decoder(as_map)
        self._array = msgspec.msgpack.Decoder(as_array)
        self._array_fields = ("type", *(field.name for field in msgspec.structs.fields(as_array)))
        self._word = word

    def read(self, raw: msgspec.Raw, where: str, *, is_array: bool) -> EngineEvent:
        """Decode one event of this type. Raises ProtocolError."""
        if is_array:
            return self._word(decoded(self._array, raw, where, self._array_fields), where)
        return self._word(decoded(self._map, raw, where), where)


class _Batch(msgspec.Struct):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: Count | None = None


class _BatchArray(_Batch, array_like=True):
    pass


class _BatchMap(_Batch):
    attn_dp_rank: Count | None = None


class _Type(msgspec.Struct):
    type: str


class _TypeArray(_Type, array_like=True):
    pass


_BATCH_ARRAY = msgspec.msgpack.Decoder(_BatchArray)
_BATCH_MAP = msgspec.msgpack.Decoder(_BatchMap)
_TYPE_ARRAY = msgspec.msgpack.Decoder(_TypeArray)
_TYPE_MAP = msgspec.msgpack.Decoder(_Type)


def read_batch(payload: bytes, shapes: Mapping[str, Shape]) -> EngineBatch:
    """Decode one payload with the ``shapes`` of an engine, by event type; another type is skipped.

    Raises ProtocolError, which names the field.
    """
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"payload: 1 to {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}", param="payload")
    if _is_array(payload[0]):
        batch: _Batch = decoded(_BATCH_ARRAY, payload, "", ("ts", "events", "data_parallel_rank"))
    else:
        batch = decoded(_BATCH_MAP, payload, "")
    dp_rank = batch.data_parallel_rank
    if dp_rank is None and isinstance(batch, _BatchMap):
        dp_rank = batch.attn_dp_rank
    events = tuple(_read_event(raw, f"events[{i}]", shapes) for i, raw in enumerate(batch.events))
    return EngineBatch(events, None if dp_rank is None else DpRank(dp_rank), batch.ts)


def _read_event(raw: msgspec.Raw, where: str, shapes: Mapping[str, Shape]) -> EngineEvent:
    is_array = _is_array(memoryview(raw)[0])
    kind = decoded(_TYPE_ARRAY, raw, where, ("type",)) if is_array else decoded(_TYPE_MAP, raw, where)
    shape = shapes.get(kind.type)
    if shape is None:
        return EngineSkipped(Skipped.UNKNOWN_EVENT)
    return shape.read(raw, where, is_array=is_array)


class Decoder(Protocol[_T_co]):
    """What msgspec decodes one type with."""

    def decode(self, data: bytes | msgspec.Raw, /) -> _T_co:
        """Decode."""


def decoded(
    decoder: Decoder[_T_co], data: bytes | msgspec.Raw, where: str, array_fields: Sequence[str] = ()
) -> _T_co:
    """Decode ``data``, which stands at ``where``; an array's fields are named by ``array_fields``.

    Raises ProtocolError, which names the field.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        field = _field(str(error), where, array_fields)
        raise ProtocolError(f"{field}: {error}", param=field) from error


def _field(message: str, where: str, array_fields: Sequence[str]) -> str:
    """The name of the field that a message of msgspec is about; the payload when it says none."""
    found = _PATH.search(message)
    path = found[1] if found else ""
    index = _FIRST_INDEX.match(path)
    if index is not None and int(index[1]) < len(array_fields):
        path = f".{array_fields[int(index[1])]}{path[index.end() :]}"
    return f"{where}{path}".removeprefix(".") or "payload"


def _is_array(first_byte: int) -> bool:
    """Whether a msgpack value is an array: fixarray, array 16 or array 32."""
    return 0x90 <= first_byte <= 0x9F or first_byte in (0xDC, 0xDD)
