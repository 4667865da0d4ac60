"""A batch in msgpack: ``[ts, events, dp_rank]``, each event an array with its type first, or a map with one.

The fields of an event differ by engine: each passes in a struct for maps and one for arrays.

Engines publish ``topic, seq, payload``; seq is 8 bytes, big-endian. A replay is asked for with ``b"", seq``
and comes as one message a batch: ``b"", seq, payload`` (vLLM to 0.25) or ``b"", topic, seq, payload``; the
first frame is missing where a REQ socket swallowed it. The number −1 ends it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvrouter._native import engine_events, engine_names, engine_tokens
from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import DpRank, EngineHash
from kvrouter.core.json import Decoder, Unreadable, unpack
from kvrouter.core.requests import TokenBuffer
from kvrouter.engines.kv_events.engine_events import (
    EVENTS_MAX,
    HASHES_MAX,
    OBJECTS_MAX,
    PAYLOAD_BYTES_MAX,
    PAYLOAD_TIMES,
    TOKENS_MAX,
    CacheGroup,
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineSkipped,
    EngineStored,
    MmHashes,
    Skipped,
    engine_hash,
    medium_of,
)

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)
_T = TypeVar("_T")

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_FIRST_INDEX = re.compile(r"^\[(\d+)\]")


class EventShape(Generic[FieldsT]):
    """One type of event: its struct as a map and as an array, and its conversion to an engine event.

    ``convert`` gets the struct, and the struct's place in the batch for its errors.
    """

    def __init__(
        self,
        *,
        as_map: type[FieldsT],
        as_array: type[FieldsT],
        convert: Callable[[FieldsT, str], EngineEvent],
    ) -> None:
        self._map = msgspec.msgpack.Decoder(as_map)
        self._array = msgspec.msgpack.Decoder(as_array)
        self._array_fields = ("type", *(field.name for field in msgspec.structs.fields(as_array)))
        self._convert = convert

    def read(self, raw: bytes, where: str, *, is_array: bool) -> EngineEvent:
        """Decode one event of this type; ``where`` is its place in the batch. Raises ProtocolError."""
        if is_array:
            return self._convert(decoded(self._array, raw, where, self._array_fields), where)
        return self._convert(decoded(self._map, raw, where), where)


_UNKNOWN_EVENT = EngineSkipped(Skipped.UNKNOWN_EVENT)

EventShapes: TypeAlias = Mapping[str, EventShape[Any]]
"""The types of events of one kind of engine, by their names."""


class _Batch(msgspec.Struct):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: Count | None = None


class _BatchArray(_Batch, array_like=True):
    pass


class _BatchMap(_Batch):
    attn_dp_rank: Count | None = None


_BATCH_ARRAY = msgspec.msgpack.Decoder(_BatchArray)
_BATCH_MAP = msgspec.msgpack.Decoder(_BatchMap)


def read_batch(payload: bytes, shapes: EventShapes) -> EngineBatch:
    """Decode one payload with the ``shapes`` of an engine, by event type; another type is skipped.

    Raises ProtocolError, which names the field.
    """
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"payload: 1 to {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}", param="payload")
    if array_length(memoryview(payload)) is not None:
        batch: _Batch = decoded(_BATCH_ARRAY, payload, "", ("ts", "events", "data_parallel_rank"))
    else:
        batch = decoded(_BATCH_MAP, payload, "")
    dp_rank = batch.data_parallel_rank
    if dp_rank is None and isinstance(batch, _BatchMap):
        dp_rank = batch.attn_dp_rank
    try:
        raws = engine_events(batch.events, EVENTS_MAX)
    except ValueError as error:
        raise _list_error("events", error) from error
    events: list[EngineEvent] = []
    n_objects = 0
    for i, (kind, is_array, raw) in enumerate(raws):
        shape, where = shapes.get(kind), f"events[{i}]"
        event = _UNKNOWN_EVENT if shape is None else shape.read(raw, where, is_array=is_array)
        if isinstance(event, EngineStored) and event.mm_hashes is not None:
            n_objects += sum(map(len, event.mm_hashes))
            if n_objects > OBJECTS_MAX:
                raise ProtocolError(f"{where}: over {OBJECTS_MAX} objects in one batch", param=where)
        events.append(event)
    return EngineBatch(tuple(events), None if dp_rank is None else DpRank(dp_rank), batch.ts)


def decoded(
    decoder: Decoder[_T], data: bytes | msgspec.Raw, where: str, array_fields: Sequence[str] = ()
) -> _T:
    """Decode ``data``; errors name its place ``where``, and an array's fields by ``array_fields``.

    Raises ProtocolError, which names the field.
    """
    try:
        return unpack(decoder, data, times=PAYLOAD_TIMES)
    except Unreadable as error:
        field = _field(str(error), where, array_fields)
        raise ProtocolError(f"{field}: {error}", param=field) from error


def _field(message: str, where: str, array_fields: Sequence[str]) -> str:
    """Return the field that a message of msgspec names; the payload without one."""
    found = _PATH.search(message)
    path = found[1] if found else ""
    index = _FIRST_INDEX.match(path)
    if index is not None and int(index[1]) < len(array_fields):
        path = f".{array_fields[int(index[1])]}{path[index.end() :]}"
    return f"{where}{path}".removeprefix(".") or "payload"


def array_length(value: memoryview) -> int | None:
    """Return the length of a msgpack array from its header; None if it is no array."""
    first = value[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    size = {0xDC: 2, 0xDD: 4}.get(first)
    return None if size is None else int.from_bytes(value[1 : 1 + size], "big")


WireHash = int | bytes

Name = Annotated[str, msgspec.Meta(max_length=4096)]

HASH_BYTES_RANGE = range(8, 65)


class StoredFields(msgspec.Struct):
    """How ``BlockStored`` begins in every engine. The native core reads the lists of hashes and token ids."""

    block_hashes: msgspec.Raw
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: Count
    lora_id: int | None = None
    medium: Name | None = None


class RemovedFields(msgspec.Struct):
    """How ``BlockRemoved`` begins in every engine."""

    block_hashes: msgspec.Raw
    medium: Name | None = None


class _RemovedArray(RemovedFields, array_like=True, tag="BlockRemoved"):
    pass


class _RemovedMap(RemovedFields, tag_field="type", tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _ClearedMap(_Cleared, tag_field="type", tag="AllBlocksCleared"):
    pass


def _cleared(_event: _Cleared, _where: str) -> EngineEvent:
    return EngineCleared()


CLEARED: EventShape[Any] = EventShape(as_map=_ClearedMap, as_array=_ClearedArray, convert=_cleared)
"""``AllBlocksCleared``, which has no fields in any engine."""


def stored_event(
    fields: StoredFields,
    where: str,
    *,
    token_ids: TokenBuffer | None = None,
    lora_name: str | None,
    cache_salt: str | None,
    mm_hashes: MmHashes | None = None,
    group: CacheGroup | None = None,
    lookahead_tokens: int = 0,
) -> EngineEvent:
    """Return the engine event for a store; ``token_ids`` if they are read already. Raises ProtocolError,
    which names the field.
    """
    medium = medium_of(fields.medium)
    if medium is None:
        return skipped(Skipped.UNKNOWN_MEDIUM, fields)
    names = names_of(fields, where)
    if token_ids is None:
        token_ids = tokens_of(fields, where)[0]
    parent = fields.parent_block_hash
    return EngineStored(
        names,
        None if parent is None else _parent_of(parent, where),
        token_ids,
        fields.block_size,
        medium,
        group,
        lora_name or None,
        fields.lora_id,
        cache_salt or None,
        mm_hashes,
        lookahead_tokens,
    )


def removed_event(fields: RemovedFields, where: str, *, group_key: int | None = None) -> EngineEvent:
    """Return the engine event for a removal. Raises ProtocolError, which names the field."""
    medium = medium_of(fields.medium)
    if medium is None:
        return skipped(Skipped.UNKNOWN_MEDIUM, fields)
    return EngineRemoved(names_of(fields, where), medium, group_key)


def skipped(why: Skipped, fields: StoredFields | RemovedFields) -> EngineSkipped:
    """Return an event that is not used. Its lists are not read: what is wrong in them costs other events
    nothing.
    """
    return EngineSkipped(why, array_length(memoryview(fields.block_hashes)) or 0)


def names_of(fields: StoredFields | RemovedFields, where: str) -> tuple[EngineHash, ...]:
    """The names of an event's blocks. Raises ProtocolError, which names the field."""
    try:
        return engine_names(fields.block_hashes, HASHES_MAX)
    except ValueError as error:
        raise _list_error(f"{where}.block_hashes", error) from error


def tokens_of(
    fields: StoredFields, where: str, *, takes_texts: bool = False
) -> tuple[TokenBuffer, Sequence[tuple[int, str]]]:
    """The token ids, and the texts among them with their places; a text has the id 0.

    An engine may key its blocks by pairs of each token and the next one: of a pair the first one counts, so
    that such blocks are found by their tokens. Raises ProtocolError, which names the field.
    """
    try:
        return engine_tokens(fields.token_ids, TOKENS_MAX, takes_texts)
    except ValueError as error:
        raise _list_error(f"{where}.token_ids", error) from error


def _list_error(field: str, error: ValueError) -> ProtocolError:
    place, why = error.args
    return ProtocolError(f"{field}{place}: {why}", param=f"{field}{place}")


def _parent_of(value: WireHash, where: str) -> EngineHash:
    if isinstance(value, bytes) and len(value) not in HASH_BYTES_RANGE:
        field = f"{where}.parent_block_hash"
        raise ProtocolError(f"{field}: a hash of 8 to 64 bytes, not {len(value)}", param=field)
    return engine_hash(value)


REMOVED: EventShape[Any] = EventShape(as_map=_RemovedMap, as_array=_RemovedArray, convert=removed_event)
"""``BlockRemoved`` of an engine with a single cache group."""


SEQ_BYTES = 8
TOPIC_BYTES_MAX = 1024
REPLAY_END = (-1).to_bytes(SEQ_BYTES, "big", signed=True)


class Published(NamedTuple):
    """One batch on its way: batches of one start of an engine count from 0."""

    seq: int
    payload: bytes
    topic: bytes = b""


class ReplayEnd(NamedTuple):
    """Nothing more is replayed."""


def read_published(frames: Sequence[bytes]) -> Published:
    """Read the frames of a subscription. Raises ProtocolError."""
    if len(frames) != 3:
        raise ProtocolError(f"frames: topic, seq and payload, not {len(frames)} frames", param="frames")
    topic, seq, payload = frames
    if seq == REPLAY_END:
        raise ProtocolError("seq: the end of a replay, on the publishing socket", param="seq")
    return _batch(topic, seq, payload)


def read_replayed(frames: Sequence[bytes]) -> Published | ReplayEnd:
    """Read the frames of one answer to :func:`replay_question`, in either framing. Raises ProtocolError."""
    # The number is the last frame but one in every form; the topic may be empty, as the first frame is.
    if not 2 <= len(frames) <= 4:
        raise ProtocolError(
            f"frames: an empty one, topic, seq and payload, not {len(frames)} frames", param="frames"
        )
    *before, seq, payload = frames
    if len(before) == 2 and before[0]:
        raise ProtocolError("frames[0]: empty before topic, seq and payload", param="frames[0]")
    if seq == REPLAY_END:
        if payload:
            raise ProtocolError(f"payload: nothing ends a replay, not {len(payload)} bytes", param="payload")
        return ReplayEnd()
    return _batch(before[-1] if before else b"", seq, payload)


def replay_question(start_seq: int) -> tuple[bytes, bytes]:
    """The frames that ask, on a DEALER socket, for every batch from ``start_seq`` on that the engine has."""
    return b"", start_seq.to_bytes(SEQ_BYTES, "big")


def _batch(topic: bytes, seq: bytes, payload: bytes) -> Published:
    if len(topic) > TOPIC_BYTES_MAX:
        raise ProtocolError(f"topic: {len(topic)} bytes are more than {TOPIC_BYTES_MAX}", param="topic")
    if len(seq) != SEQ_BYTES:
        raise ProtocolError(f"seq: {SEQ_BYTES} bytes, not {len(seq)}", param="seq")
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"payload: {len(payload)} bytes are more than {PAYLOAD_BYTES_MAX}", param="payload"
        )
    return Published(int.from_bytes(seq, "big"), bytes(payload), bytes(topic))
