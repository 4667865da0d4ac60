"""SGLang's KV events: vLLM's types with other fields, as maps, and as arrays before; decoded, nothing else.

Hashes are signed. Every store names its salt, and the adapter by its public name. A model that keys its cache
by each token and the next one tells pairs; the ids that stand for images are already in ``token_ids``.
"""

from kvrouter.engines.customs.batches import EventShape, Shape, read_batch
from kvrouter.engines.customs.fields import CLEARED, REMOVED, Name, StoredFields, stored_word
from kvrouter.engines.customs.words import EngineBatch, EngineEvent


class _Stored(StoredFields):
    cache_salt: Name | None = None
    session_id: Name | None = None
    lora_name: Name | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    pass


def decode(payload: bytes) -> tuple[EngineBatch, ...]:
    """Decode what one SGLang scheduler published at once. Raises ProtocolError, which names the field."""
    return (read_batch(payload, _SHAPES),)


def _stored(wire: _Stored, where: str) -> EngineEvent:
    return stored_word(wire, where, lora_name=wire.lora_name, cache_salt=wire.cache_salt)


_SHAPES: dict[str, Shape] = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, word=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}
