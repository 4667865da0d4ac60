"""TensorRT-LLM's KV events as its server and others publish them for routers; written from the known format.

The types are vLLM's, one event a batch, as maps. The publisher leaves out partial blocks and all attention
windows but the largest; :mod:`kvrouter.engines.trtllm.native` reads the events that it makes these from.
"""

from typing import Annotated

import msgspec

from kvrouter.engines.customs.batches import EventShape, Shape, read_batch
from kvrouter.engines.customs.fields import CLEARED, REMOVED, Name, StoredFields, stored_word
from kvrouter.engines.customs.words import HASH_MASK, HASHES_MAX, EngineBatch, EngineEvent


class _MmObject(msgspec.Struct):
    mm_hash: int


class _MmInfo(msgspec.Struct):
    mm_objects: list[_MmObject]


class _Stored(StoredFields):
    lora_name: Name | None = None
    block_mm_infos: Annotated[list[_MmInfo | None], msgspec.Meta(max_length=HASHES_MAX)] | None = None
    cache_salt: Name | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    pass


def decode(payload: bytes) -> tuple[EngineBatch, ...]:
    """Decode one batch in the published form. Raises ProtocolError, which names the field."""
    return (read_batch(payload, _SHAPES),)


def _stored(wire: _Stored, where: str) -> EngineEvent:
    rows = tuple(
        () if info is None else tuple(each.mm_hash & HASH_MASK for each in info.mm_objects)
        for info in wire.block_mm_infos or ()
    )
    return stored_word(
        wire,
        where,
        lora_name=wire.lora_name,
        cache_salt=wire.cache_salt,
        mm_hashes=rows if any(rows) else None,
    )


_SHAPES: dict[str, Shape] = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, word=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}
