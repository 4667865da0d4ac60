"""The fields that the published events of every engine have, and the words that they become."""

from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import EngineHash
from kvrouter.core.requests import TokenBuffer
from kvrouter.engines.customs.batches import Count, EventShape, Shape
from kvrouter.engines.customs.words import (
    HASHES_MAX,
    TOKENS_MAX,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineSkipped,
    EngineStored,
    Group,
    MmHashes,
    Skipped,
    engine_hash,
    medium_of,
)

# msgspec 0.22 crashes on a bound of an int that shares its union with a tuple, so bounds of token ids and the
# lengths of hashes are checked here instead.
WireHash = int | bytes
WireHashes = Annotated[list[WireHash], msgspec.Meta(max_length=HASHES_MAX)]
WireTokens = Annotated[list[int | tuple[int, int]], msgspec.Meta(max_length=TOKENS_MAX)]
"""Token ids; pairs where an engine keys its blocks by each token and the one after it."""

Name = Annotated[str, msgspec.Meta(max_length=4096)]

HASH_BYTES_RANGE = range(8, 65)


class StoredFields(msgspec.Struct):
    """How ``BlockStored`` begins in every engine."""

    block_hashes: WireHashes
    parent_block_hash: WireHash | None
    token_ids: WireTokens
    block_size: Count
    lora_id: int | None = None
    medium: Name | None = None


class RemovedFields(msgspec.Struct):
    """How ``BlockRemoved`` begins in every engine."""

    block_hashes: WireHashes
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


def _cleared(_wire: _Cleared, _where: str) -> EngineEvent:
    return EngineCleared()


CLEARED: Shape = EventShape(as_map=_ClearedMap, as_array=_ClearedArray, word=_cleared)
"""``AllBlocksCleared``, which has no fields in any engine."""


def stored_word(
    wire: StoredFields,
    where: str,
    *,
    lora_name: str | None,
    cache_salt: str | None,
    mm_hashes: MmHashes | None = None,
    group: Group | None = None,
) -> EngineEvent:
    """The word for a store. Raises ProtocolError, which names the field."""
    names = names_of(wire.block_hashes, f"{where}.block_hashes")
    parent = wire.parent_block_hash
    medium = medium_of(wire.medium)
    if medium is None:
        return EngineSkipped(Skipped.UNKNOWN_MEDIUM, len(names))
    return EngineStored(
        names=names,
        parent=None if parent is None else _name_of(parent, f"{where}.parent_block_hash"),
        token_ids=tokens_of(wire.token_ids, f"{where}.token_ids"),
        block_size=wire.block_size,
        medium=medium,
        group=group,
        lora_name=lora_name or None,
        lora_id=wire.lora_id,
        cache_salt=cache_salt or None,
        mm_hashes=mm_hashes,
    )


def removed_word(wire: RemovedFields, where: str, *, group_key: int | None = None) -> EngineEvent:
    """The word for a removal. Raises ProtocolError, which names the field."""
    names = names_of(wire.block_hashes, f"{where}.block_hashes")
    medium = medium_of(wire.medium)
    if medium is None:
        return EngineSkipped(Skipped.UNKNOWN_MEDIUM, len(names))
    return EngineRemoved(names, medium, group_key)


def names_of(hashes: Sequence[WireHash], field: str) -> tuple[EngineHash, ...]:
    """The names of blocks. Raises ProtocolError, which names ``field``."""
    for i, value in enumerate(hashes):
        _check_length(value, f"{field}[{i}]")
    return tuple(map(engine_hash, hashes))


def _name_of(value: WireHash, field: str) -> EngineHash:
    _check_length(value, field)
    return engine_hash(value)


def _check_length(value: WireHash, field: str) -> None:
    if isinstance(value, bytes) and len(value) not in HASH_BYTES_RANGE:
        raise ProtocolError(f"{field}: a hash of 8 to 64 bytes, not {len(value)}", param=field)


def tokens_of(token_ids: Sequence[int | tuple[int, int]], field: str) -> TokenBuffer:
    """The token ids; of a pair the first one, so that blocks of pairs are found by their tokens.

    Raises ProtocolError, which names ``field``.
    """
    singles: Sequence[int | tuple[int, int]] = token_ids
    if token_ids and isinstance(token_ids[0], tuple):
        singles = [each[0] if isinstance(each, tuple) else each for each in token_ids]
    try:
        return array("I", singles)  # type: ignore[arg-type]  # a pair among single ones is the TypeError below
    except (OverflowError, TypeError) as error:
        i = next(i for i, token in enumerate(singles) if isinstance(token, tuple) or not 0 <= token < 2**32)
        at = f"{field}[{i}]"
        raise ProtocolError(f"{at}: a token id is within 0..2**32-1, not {singles[i]}", param=at) from error


REMOVED: Shape = EventShape(as_map=_RemovedMap, as_array=_RemovedArray, word=removed_word)
"""``BlockRemoved`` of an engine whose caches are one group."""
