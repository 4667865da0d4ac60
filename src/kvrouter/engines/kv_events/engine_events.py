"""Decoded KV events of an engine, in one form for all engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvrouter.core.events import Medium
from kvrouter.core.ids import DpRank, EngineHash
from kvrouter.core.requests import TokenBuffer

PAYLOAD_BYTES_MAX = 64 << 20
"""A published batch is no longer; an engine's step is a few hundred kilobytes."""

EVENTS_MAX = 1 << 16
HASHES_MAX = 1 << 16
TOKENS_MAX = 1 << 22
"""The most events in a batch, hashes in one event, token ids in one event."""

OBJECTS_MAX = 1 << 18
"""The most multimodal objects in a batch, counted for each block."""

PAYLOAD_TIMES = 9
"""A batch may hold this many times a frame between processes: more values than an event has tokens."""

FIRST_RANK = DpRank(0)

HASH_MASK = (1 << 64) - 1


MmHashes = tuple[tuple[int, ...], ...]
"""For each block the hashes of its multimodal objects, as ``core.hashing.multimodal_hash`` makes them."""


class Skipped(StrEnum):
    """Why an event or block is not passed on; blocks are counted, or else the things named here.

    ``UNREADABLE``: a message with an invalid encoding. ``MISSED``: a final loss, of any number of batches.
    ``UNKNOWN_EVENT``: an event of a type without meaning here. ``ORPHAN``: a block with an unknown parent, as
    after attaching late. ``UNKNOWN_REMOVED``: the removal of a block that is unknown, or not counted.
    ``OTHER_GROUP``: a cache group that does not decide reuse. ``OTHER_BLOCK_SIZE``, ``TOKENS_MISMATCH``:
    blocks that are not runs of our block size. ``NO_TOKENS``: a store without token ids of an unknown block.
    ``UNNAMED_LORA``: an adapter by a number without a name. ``NOT_LOCAL``: held elsewhere. ``OVER_LIMIT``:
    more blocks than a rank may have here.
    """

    UNREADABLE = "unreadable"
    MISSED = "missed"
    ORPHAN = "orphan"
    UNKNOWN_REMOVED = "unknown_removed"
    UNKNOWN_EVENT = "unknown_event"
    UNKNOWN_MEDIUM = "unknown_medium"
    OTHER_GROUP = "other_group"
    OTHER_BLOCK_SIZE = "other_block_size"
    TOKENS_MISMATCH = "tokens_mismatch"
    NO_TOKENS = "no_tokens"
    UNNAMED_LORA = "unnamed_lora"
    NOT_LOCAL = "not_local"
    OVER_LIMIT = "over_limit"


class CacheGroup(NamedTuple):
    """One of the caches of a hybrid model: full attention, a sliding window, a state.

    The group of the highest ``standing`` decides what can be reused; among equals, the first one reported.
    """

    key: int
    standing: int


class EngineStored(msgspec.Struct, frozen=True):
    """Consecutive blocks were stored, ``block_size`` of the ``token_ids`` in each of ``names``.

    ``mm_hashes[i]`` are the multimodal objects in block ``i``. A salt is named where a sequence begins, and
    applies to the blocks after it. An empty ``token_ids`` means blocks that were stored elsewhere before. The
    names also cover ``lookahead_tokens`` tokens behind each block: a prompt without them does not find it.
    """

    names: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: TokenBuffer
    block_size: int
    medium: Medium = Medium.GPU
    group: CacheGroup | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    mm_hashes: MmHashes | None = None
    lookahead_tokens: int = 0


class EngineRemoved(msgspec.Struct, frozen=True):
    """Blocks left ``medium``; None: the medium that holds them.

    ``group_key`` is None if the engine has one group.
    """

    names: tuple[EngineHash, ...]
    medium: Medium | None = Medium.GPU
    group_key: int | None = None


class EngineMoved(msgspec.Struct, frozen=True):
    """A block went from one medium to another."""

    name: EngineHash
    source: Medium
    target: Medium
    group_key: int | None = None


class EngineCleared(msgspec.Struct, frozen=True):
    """Every block of the rank is gone."""


class EngineGroup(msgspec.Struct, frozen=True):
    """The engine created a cache group, which is empty."""

    group: CacheGroup


class EngineSkipped(msgspec.Struct, frozen=True):
    """An event without effect on the blocks held here."""

    reason: Skipped
    n: int = 1


EngineEvent = EngineStored | EngineRemoved | EngineMoved | EngineCleared | EngineGroup | EngineSkipped


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events that an engine published at once. ``dp_rank`` is None if the engine does not state it.

    ``published_s`` is the engine's wall clock and feeds metrics only.
    """

    events: tuple[EngineEvent, ...]
    dp_rank: DpRank | None = None
    published_s: float = 0.0


Decode = Callable[[bytes], tuple[EngineBatch, ...]]
"""An engine's payload to its batches, one for each rank that it speaks of; raises ProtocolError."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Values of an engine that decoding its KV events needs.

    ``dp_rank`` applies to batches that name no rank. ``lora_names`` has the names of adapters that an engine
    names by number only. ``blocks_max`` limits the blocks of one rank.
    """

    block_size: int
    dp_rank: DpRank = FIRST_RANK
    lora_names: Mapping[int, str] = field(default_factory=dict)
    blocks_max: int = 1 << 24


def engine_hash(value: int | bytes) -> EngineHash:
    """The unsigned 64 bits of an engine's hash: the low ones, of bytes the last eight, as vLLM shortens them.

    A hash that is published signed, unsigned or whole has one name, so forms may be mixed.
    """
    if isinstance(value, bytes):
        return EngineHash(int.from_bytes(value[-8:], "big"))
    return EngineHash(value & HASH_MASK)


_MEDIA = {
    "GPU": Medium.GPU,
    "DEVICE": Medium.GPU,
    "CPU": Medium.CPU,
    "CPU_PINNED": Medium.CPU,
    "CPU_TIER1": Medium.CPU,
    "CPU_TIER2": Medium.DISK,
    "DISK": Medium.DISK,
    "NVME": Medium.DISK,
    "STORAGE": Medium.DISK,
    "EXTERNAL": Medium.EXTERNAL,
    "NETWORK": Medium.EXTERNAL,
    "REMOTE": Medium.EXTERNAL,
    "SHARED": Medium.EXTERNAL,
}


def medium_of(name: str | None) -> Medium | None:
    """Return the medium that engines call ``name``: without a name the GPU; None for an unknown name."""
    return Medium.GPU if name is None else _MEDIA.get(name.upper())
