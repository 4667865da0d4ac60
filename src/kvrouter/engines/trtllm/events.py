"""TensorRT-LLM's KV events: published in msgpack since 1.3, and its own JSON.

The types are vLLM's, as maps. The publisher leaves out partial blocks and all attention windows but the
largest; :mod:`kvrouter.engines.trtllm.events` reads the events that these are made from. The objects that a
block depends on are in ``mm_keys``, or in ``block_mm_infos`` of other publishers. Written from the known
format.

The last block of a sequence may be partial: it and its removal are dropped. Each attention window has a
separate cache under the same hashes, and the largest decides what is reused. A block that goes to the host
and comes back is *updated*. Blocks are named by numbers, or by the hexadecimal digits of a digest.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Medium
from kvrouter.core.hashing import multimodal_hash
from kvrouter.core.ids import DpRank, EngineHash
from kvrouter.core.requests import TokenBuffer
from kvrouter.engines.kv_events.batches import (
    CLEARED,
    REMOVED,
    Count,
    EventShape,
    EventShapes,
    Name,
    Published,
    StoredFields,
    decoded,
    names_of,
    read_batch,
    stored_event,
    tokens_of,
)
from kvrouter.engines.kv_events.engine_events import (
    EVENTS_MAX,
    FIRST_RANK,
    HASH_MASK,
    HASHES_MAX,
    PAYLOAD_BYTES_MAX,
    CacheGroup,
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineGroup,
    EngineMoved,
    EngineRemoved,
    EngineSkipped,
    EngineStored,
    MmHashes,
    Skipped,
    engine_hash,
)


class _MmObject(msgspec.Struct):
    mm_hash: int


class _MmInfo(msgspec.Struct):
    mm_objects: list[_MmObject]


class _MmKey(msgspec.Struct):
    hash: Name


class _Stored(StoredFields):
    lora_name: Name | None = None
    block_mm_infos: Annotated[list[_MmInfo | None], msgspec.Meta(max_length=HASHES_MAX)] | None = None
    cache_salt: Name | None = None
    mm_keys: Annotated[list[list[_MmKey]], msgspec.Meta(max_length=HASHES_MAX)] | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    pass


def decode(payload: bytes) -> tuple[EngineBatch, ...]:
    """Decode one batch in the published form. Raises ProtocolError, which names the field."""
    return (read_batch(payload, _SHAPES),)


def _stored(fields: _Stored, where: str) -> EngineEvent:
    """A token id that is no number is a piece of an object."""
    token_ids, texts = tokens_of(fields, where, takes_texts=True)
    rows: MmHashes = ()
    if texts or fields.block_mm_infos or fields.mm_keys:
        pieces: list[set[str]] = [set() for _ in names_of(fields, where)]
        for place, text in texts:
            if place < len(pieces) * fields.block_size:
                pieces[place // fields.block_size].add(text)
        rows = tuple(_objects(fields, i, each) for i, each in enumerate(pieces))
    return stored_event(
        fields,
        where,
        token_ids=token_ids,
        lora_name=fields.lora_name,
        cache_salt=fields.cache_salt,
        mm_hashes=rows if any(rows) else None,
    )


def _objects(fields: _Stored, i: int, pieces: set[str]) -> tuple[int, ...]:
    """Return the objects that block ``i`` depends on in addition to its tokens."""
    info = (fields.block_mm_infos or ())[i : i + 1]
    objects = [each.mm_hash & HASH_MASK for entry in info if entry is not None for each in entry.mm_objects]
    objects += [multimodal_hash(key.hash) for keys in (fields.mm_keys or ())[i : i + 1] for key in keys]
    return (*objects, *sorted(map(multimodal_hash, pieces)))


_SHAPES: EventShapes = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, convert=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}


_LEVELS: Final = (Medium.GPU, Medium.CPU)
"""The media of TensorRT-LLM's cache levels: primary, secondary."""

LAYER_GROUPS_MAX = 1 << 16


_Hash = int | Name


class _Token(msgspec.Struct):
    token_id: int | str
    token_extra_id: int = 0


class _Block(msgspec.Struct):
    block_hash: _Hash
    tokens: list[_Token] = []
    cache_level: Count = 0
    mm_keys: list[_MmKey] | None = None
    cache_salt: Name | None = None
    lora_id: int | None = None


class _StoredData(msgspec.Struct, tag_field="type", tag="stored"):
    blocks: Annotated[list[_Block], msgspec.Meta(max_length=HASHES_MAX)]
    parent_hash: _Hash | None = None
    lora_name: Name | None = None


class _RemovedData(msgspec.Struct, tag_field="type", tag="removed"):
    block_hashes: Annotated[list[_Hash], msgspec.Meta(max_length=HASHES_MAX)]


class _Change(msgspec.Struct):
    old_value: Count
    new_value: Count


class _UpdatedData(msgspec.Struct, tag_field="type", tag="updated"):
    block_hash: _Hash
    cache_level: _Change | None = None


class _CreatedData(msgspec.Struct, tag_field="type", tag="created"):
    pass


class _ClearedData(msgspec.Struct, tag_field="type", tag="all_cleared"):
    pass


_Data = _StoredData | _RemovedData | _UpdatedData | _CreatedData | _ClearedData


class _Type(msgspec.Struct):
    type: str


class _Event(msgspec.Struct):
    event_id: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    data: msgspec.Raw
    window_size: Count | None = None
    layer_group_id: Annotated[int, msgspec.Meta(ge=0, lt=LAYER_GROUPS_MAX)] | None = None
    attention_dp_rank: Count | None = None


_KINDS = {"stored", "removed", "updated", "created", "all_cleared"}
_EVENT = msgspec.json.Decoder(_Event)
_EVENTS = msgspec.json.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)])
_TYPE = msgspec.json.Decoder(_Type)
_DATA: msgspec.json.Decoder[_Data] = msgspec.json.Decoder(_Data)


def native_batches(payload: bytes) -> tuple[tuple[DpRank, Published], ...]:
    """Return the events of one poll, each as a batch with the event's id as number, in its rank's stream.

    Ids count up in each rank; pass each rank's to a separate ``EngineEventStream``, without replay. Raises
    ProtocolError, which names the field.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"payload: {len(payload)} bytes are more than {PAYLOAD_BYTES_MAX}", param="payload"
        )
    found = []
    for i, raw in enumerate(decoded(_EVENTS, payload, "")):
        event = decoded(_EVENT, raw, f"[{i}]")
        found.append((DpRank(event.attention_dp_rank or 0), Published(event.event_id, bytes(raw))))
    return tuple(found)


class NativeEvents:
    """Decodes the events of an engine with blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def decode(self, payload: bytes) -> tuple[EngineBatch, ...]:
        """Decode one event. Raises ProtocolError, which names the field."""
        event = decoded(_EVENT, payload, "")
        if decoded(_TYPE, event.data, "data").type not in _KINDS:
            events: Sequence[EngineEvent] = (EngineSkipped(Skipped.UNKNOWN_EVENT),)
        else:
            events = self._events_of(event, decoded(_DATA, event.data, "data"))
        return (EngineBatch(tuple(events), DpRank(event.attention_dp_rank or FIRST_RANK)),)

    def _events_of(self, event: _Event, data: _Data) -> Sequence[EngineEvent]:
        group = _group(event)
        key = None if group is None else group.key
        match data:
            case _StoredData():
                return self._stored(data, group)
            case _RemovedData():
                names = tuple(_name(each, "data.block_hashes") for each in data.block_hashes)
                return (EngineRemoved(names, None, key),)
            case _UpdatedData():
                return _updated(data, key)
            case _CreatedData():
                return () if group is None else (EngineGroup(group),)
            case _ClearedData():
                return (EngineCleared(),)

    def _stored(self, data: _StoredData, group: CacheGroup | None) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        parent = None if data.parent_hash is None else _name(data.parent_hash, "data.parent_hash")
        for level, blocks in _runs(self._full(data.blocks)):
            if level >= len(_LEVELS):
                events.append(EngineSkipped(Skipped.UNKNOWN_MEDIUM, len(blocks)))
            else:
                events.append(_run(blocks, data, parent=parent, group=group, block_size=self._block_size))
            parent = _name(blocks[-1].block_hash, "data.blocks.block_hash")
        return events

    def _full(self, blocks: Sequence[_Block]) -> Sequence[_Block]:
        """The blocks before the first partial one; an engine may leave the tokens out altogether."""
        for i, block in enumerate(blocks):
            if len(block.tokens) > self._block_size:
                at = f"data.blocks[{i}].tokens"
                raise ProtocolError(
                    f"{at}: {len(block.tokens)} tokens in a block of {self._block_size}", param=at
                )
            if 0 < len(block.tokens) < self._block_size:
                return blocks[:i]
        return blocks


def _run(
    blocks: Sequence[_Block],
    data: _StoredData,
    *,
    parent: EngineHash | None,
    group: CacheGroup | None,
    block_size: int,
) -> EngineStored:
    """Return a store of consecutive blocks in one medium. An id that is no number is a piece of an object."""
    ids = [0 if isinstance(token.token_id, str) else token.token_id for b in blocks for token in b.tokens]
    rows = tuple(_extras(block) for block in blocks)
    first = blocks[0]
    return EngineStored(
        names=tuple(_name(block.block_hash, "data.blocks.block_hash") for block in blocks),
        parent=parent,
        token_ids=_buffer(ids, "data.blocks.tokens"),
        block_size=block_size,
        medium=_LEVELS[first.cache_level],
        group=group,
        lora_name=data.lora_name or None,
        lora_id=first.lora_id,
        cache_salt=first.cache_salt or None,
        mm_hashes=rows if any(rows) else None,
    )


def _buffer(ids: Sequence[int], field: str) -> TokenBuffer:
    try:
        return array("I", ids)
    except OverflowError as error:
        i = next(i for i, token in enumerate(ids) if not 0 <= token < 2**32)
        at = f"{field}[{i}]"
        raise ProtocolError(f"{at}: a token id is within 0..2**32-1, not {ids[i]}", param=at) from error


def _extras(block: _Block) -> tuple[int, ...]:
    """Return what a block depends on besides its tokens: objects, and the extra ids of tokens."""
    objects = [multimodal_hash(key.hash) for key in block.mm_keys or ()]
    pieces = {token.token_id for token in block.tokens if isinstance(token.token_id, str)}
    ids = {token.token_extra_id & HASH_MASK for token in block.tokens if token.token_extra_id}
    return (*objects, *sorted(map(multimodal_hash, pieces)), *sorted(ids))


def _runs(blocks: Sequence[_Block]) -> list[tuple[int, list[_Block]]]:
    """The blocks in runs of one cache level."""
    runs: list[tuple[int, list[_Block]]] = []
    for block in blocks:
        if not runs or runs[-1][0] != block.cache_level:
            runs.append((block.cache_level, []))
        runs[-1][1].append(block)
    return runs


def _updated(data: _UpdatedData, group_key: int | None) -> Sequence[EngineEvent]:
    change = data.cache_level
    if change is None or change.old_value == change.new_value:
        return ()
    if max(change.old_value, change.new_value) >= len(_LEVELS):
        return (EngineSkipped(Skipped.UNKNOWN_MEDIUM),)
    source, target = _LEVELS[change.old_value], _LEVELS[change.new_value]
    return (EngineMoved(_name(data.block_hash, "data.block_hash"), source, target, group_key),)


def _name(value: int | str, field: str) -> EngineHash:
    """The name of a block: of a digest the last 64 bits. Raises ProtocolError, which names ``field``."""
    if isinstance(value, int):
        return engine_hash(value)
    try:
        return engine_hash(bytes.fromhex(value))
    except ValueError as error:
        raise ProtocolError(f"{field}: a hash in hexadecimal digits, not {value!r}", param=field) from error


def _group(event: _Event) -> CacheGroup | None:
    """The larger window has precedence; of the layer groups in one window, the first reported one decides."""
    if event.window_size is None:
        return None
    return CacheGroup(event.window_size * LAYER_GROUPS_MAX + (event.layer_group_id or 0), event.window_size)
