"""TensorRT-LLM's KV events as it publishes them for routers itself, since 1.3, and as others republish them.

The types are vLLM's, as maps. Whoever publishes leaves out partial blocks and all attention windows but the
largest; :mod:`kvrouter.engines.trtllm.native` reads the events that these are made from. Which objects a
block depends on stands in ``mm_keys``, or in ``block_mm_infos`` where others publish. Written from the known
format.
"""

from typing import Annotated

import msgspec

from kvrouter.core.hashing import multimodal_hash
from kvrouter.engines.customs.batches import Count, EventShape, Shape, read_batch
from kvrouter.engines.customs.fields import (
    CLEARED,
    REMOVED,
    Name,
    StoredFields,
    WireHash,
    WireHashes,
    stored_word,
)
from kvrouter.engines.customs.words import (
    HASH_MASK,
    HASHES_MAX,
    TOKENS_MAX,
    EngineBatch,
    EngineEvent,
    MmHashes,
)


class _MmObject(msgspec.Struct):
    mm_hash: int


class _MmInfo(msgspec.Struct):
    mm_objects: list[_MmObject]


class _MmKey(msgspec.Struct):
    hash: Name


class _Stored(msgspec.Struct):
    block_hashes: WireHashes
    parent_block_hash: WireHash | None
    token_ids: Annotated[list[int | Name], msgspec.Meta(max_length=TOKENS_MAX)]
    block_size: Count
    lora_id: int | None = None
    medium: Name | None = None
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


def _stored(wire: _Stored, where: str) -> EngineEvent:
    """An id that is no number stands for a piece of an object."""
    has_pieces = str in set(map(type, wire.token_ids))
    fields = StoredFields(
        wire.block_hashes,
        wire.parent_block_hash,
        [0 if isinstance(token, str) else token for token in wire.token_ids],
        wire.block_size,
        wire.lora_id,
        wire.medium,
    )
    rows: MmHashes = ()
    if has_pieces or wire.block_mm_infos or wire.mm_keys:
        rows = tuple(_objects(wire, i) for i in range(len(wire.block_hashes)))
    return stored_word(
        fields,
        where,
        lora_name=wire.lora_name,
        cache_salt=wire.cache_salt,
        mm_hashes=rows if any(rows) else None,
    )


def _objects(wire: _Stored, i: int) -> tuple[int, ...]:
    """What block ``i`` depends on beside its tokens."""
    info = (wire.block_mm_infos or ())[i : i + 1]
    objects = [each.mm_hash & HASH_MASK for told in info if told is not None for each in told.mm_objects]
    objects += [multimodal_hash(key.hash) for keys in (wire.mm_keys or ())[i : i + 1] for key in keys]
    tokens = wire.token_ids[i * wire.block_size : (i + 1) * wire.block_size]
    pieces = {token for token in tokens if isinstance(token, str)}
    return (*objects, *sorted(map(multimodal_hash, pieces)))


_SHAPES: dict[str, Shape] = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, word=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}
