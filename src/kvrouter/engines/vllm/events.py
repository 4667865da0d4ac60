"""vLLM's KV events: maps since 0.24, arrays before; decoding only.

If a block's hash depends on more than tokens, ``extra_keys`` has the rest, one entry a block, in this order:
the adapter's name, the multimodal objects, the salt (in the first block of a sequence only), digests of
prompt embeddings. Objects are ``(identifier, offset)``, and in early arrays the identifier alone.

From 0.33 on, with a drafter such as EAGLE, a block's hash also covers the tokens right behind it, which are
``lookahead_token_ids``, one list a block: the engine finds the block only for a prompt that has those too.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.hashing import multimodal_hash
from kvrouter.engines.kv_events.batches import (
    CLEARED,
    Count,
    EventShape,
    EventShapes,
    Name,
    RemovedFields,
    StoredFields,
    array_length,
    read_batch,
    removed_event,
    skipped,
    stored_event,
)
from kvrouter.engines.kv_events.engine_events import (
    HASH_MASK,
    HASHES_MAX,
    CacheGroup,
    EngineBatch,
    EngineEvent,
    MmHashes,
    Skipped,
)

_ExtraKeys = Annotated[list[list[object] | None], msgspec.Meta(max_length=HASHES_MAX)]

_STANDING = {"full_attention": 2, "mla_attention": 2, "sink_full_attention": 2}
_STANDING_UNNAMED = 1
_STANDING_OTHER = 0

_HERE = (None, "LOCAL")
"""The localities of blocks that an engine has; it merely reaches others."""

_DIGEST_DIGITS = 64

LOOKAHEAD_TOKENS_MAX = 4096
"""No drafter looks further ahead."""


class _Stored(StoredFields):
    lora_name: Name | None = None
    extra_keys: _ExtraKeys | None = None
    group_idx: Count | None = None
    kv_cache_spec_kind: Name | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    locality: Name | None = None
    lookahead_token_ids: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=HASHES_MAX)] | None = None


class _Removed(RemovedFields):
    group_idx: Count | None = None


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _RemovedMap(_Removed, tag_field="type", tag="BlockRemoved"):
    locality: Name | None = None


def decode(payload: bytes) -> tuple[EngineBatch, ...]:
    """Decode what one vLLM engine published at once. Raises ProtocolError, which names the field."""
    return (read_batch(payload, _SHAPES),)


def _stored(fields: _Stored, where: str) -> EngineEvent:
    lookahead_tokens = 0
    if isinstance(fields, _StoredMap):
        if fields.locality not in _HERE:
            return skipped(Skipped.NOT_LOCAL, fields)
        if fields.lookahead_token_ids:
            lookahead_tokens = _lookahead_tokens(fields.lookahead_token_ids, where)
    salt, mm_hashes = _read_extra_keys(fields)
    return stored_event(
        fields,
        where,
        lora_name=fields.lora_name,
        cache_salt=salt,
        mm_hashes=mm_hashes,
        group=None if fields.group_idx is None else _group(fields.group_idx, fields.kv_cache_spec_kind),
        lookahead_tokens=lookahead_tokens,
    )


def _lookahead_tokens(lists: Sequence[msgspec.Raw], where: str) -> int:
    """How many tokens behind a block its hash covers, by the longest list. Raises ProtocolError."""
    most = 0
    for i, raw in enumerate(lists):
        field = f"{where}.lookahead_token_ids[{i}]"
        length = array_length(memoryview(raw))
        if length is None or length > LOOKAHEAD_TOKENS_MAX:
            raise ProtocolError(f"{field}: a list of at most {LOOKAHEAD_TOKENS_MAX} token ids", param=field)
        most = max(most, length)
    return most


def _removed(fields: _Removed, where: str) -> EngineEvent:
    if isinstance(fields, _RemovedMap) and fields.locality not in _HERE:
        return skipped(Skipped.NOT_LOCAL, fields)
    return removed_event(fields, where, group_key=fields.group_idx)


@lru_cache(maxsize=64)
def _group(group_idx: int, kind: str | None) -> CacheGroup:
    """Full attention has to find a whole prefix, the other kinds only a state or the tokens near its end: its
    group decides what is reused. Without a kind, the first group does.
    """
    return CacheGroup(group_idx, _STANDING_UNNAMED if kind is None else _STANDING.get(kind, _STANDING_OTHER))


def _read_extra_keys(fields: _Stored) -> tuple[str | None, MmHashes | None]:
    """Return the salt, and the multimodal hashes of each block; None without any.

    Unknown keys go into the hashes of their block: a block that depends on more than its tokens must not be
    taken for one that does not.
    """
    if fields.extra_keys is None or not any(fields.extra_keys):
        return None, None
    salt: str | None = None
    rows: list[tuple[int, ...]] = []
    for i, keys in enumerate(fields.extra_keys):
        rest = list(keys or ())
        if rest and fields.lora_name and rest[0] == fields.lora_name:
            del rest[0]
        if i == 0 and fields.parent_block_hash is None:
            salt = _take_salt(rest, is_array=isinstance(fields, _StoredArray))
        rows.append(tuple(map(_key_hash, rest)))
    return salt, tuple(rows) if any(rows) else None


def _take_salt(keys: list[object], *, is_array: bool) -> str | None:
    """Remove the salt from the keys of a first block and return it: the last plain string.

    In arrays a multimodal object may be a plain string too: a digest in hexadecimal digits.
    """
    for i in range(len(keys) - 1, -1, -1):
        key = keys[i]
        if isinstance(key, str) and not (is_array and _is_digest(key)):
            del keys[i]
            return key
    return None


def _is_digest(key: str) -> bool:
    return len(key) == _DIGEST_DIGITS and all(digit in "0123456789abcdefABCDEF" for digit in key)


def _key_hash(key: object) -> int:
    if isinstance(key, list) and key:
        # An object's place follows from its tokens; its identifier alone names it, as a request does.
        key = key[0]
    if isinstance(key, str):
        return multimodal_hash(key)
    if isinstance(key, bytes):
        return multimodal_hash(key.hex())
    if isinstance(key, int):
        return key & HASH_MASK
    return multimodal_hash(type(key).__name__)


_SHAPES: EventShapes = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, convert=_stored),
    "BlockRemoved": EventShape(as_map=_RemovedMap, as_array=_RemovedArray, convert=_removed),
    "AllBlocksCleared": CLEARED,
}
