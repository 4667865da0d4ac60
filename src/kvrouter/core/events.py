"""KV events in the form that workers publish and routers read.

An engine's own encoding ends at its adapter, which decodes it to a :class:`KvBatch` and hashes the token ids,
so that no replica hashes them again.
"""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import ClassVar

import msgspec

from kvrouter import _native
from kvrouter.core.ids import EngineHash, Epoch, EventId, WorkerRank

HashColumn = bytes
"""Unsigned 64-bit integers, little-endian, 8 bytes each, in block order."""

HASH_BYTES = 8

KvEvents = _native.KvEvents


def pack_hashes(hashes: Sequence[int] | Iterable[int]) -> HashColumn:
    """Return the column of ``hashes``; each must fit in an unsigned 64-bit integer."""
    values = tuple(hashes)
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_hashes(column: HashColumn) -> tuple[int, ...]:
    """Return the hashes of ``column`` as Python ints."""
    return struct.unpack(f"<{len(column) // HASH_BYTES}Q", column)


def count_hashes(column: HashColumn) -> int:
    """Return how many hashes ``column`` holds."""
    return len(column) // HASH_BYTES


class Medium(IntEnum):
    """The storage medium of a block. Only ``GPU`` counts as overlap unless configured otherwise."""

    GPU = 0
    CPU = 1
    DISK = 2
    EXTERNAL = 3


class EventKind(IntEnum):
    """The type tag that the native index reads; see the ``kind`` of each event."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2
    HELD = 3


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Consecutive blocks were stored; the first follows ``parent``, or begins a sequence when that is None.

    ``engine_hashes[i]`` is the engine's id of the block whose own tokens hash to ``block_hashes[i]``.
    """

    kind: ClassVar[EventKind] = EventKind.STORED

    parent: EngineHash | None
    engine_hashes: HashColumn
    block_hashes: HashColumn
    medium: Medium = Medium.GPU

    def __post_init__(self) -> None:
        if len(self.engine_hashes) != len(self.block_hashes) or len(self.engine_hashes) % 8:
            raise ValueError(
                "engine_hashes and block_hashes: two columns of the same number of 8-byte hashes, "
                f"not {len(self.engine_hashes)} and {len(self.block_hashes)} bytes"
            )

    @property
    def n_blocks(self) -> int:
        """The number of stored blocks."""
        return count_hashes(self.engine_hashes)


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """Blocks were removed from a medium; one removal cancels one store."""

    kind: ClassVar[EventKind] = EventKind.REMOVED

    engine_hashes: HashColumn
    medium: Medium = Medium.GPU

    @property
    def n_blocks(self) -> int:
        """The number of listed removals."""
        return count_hashes(self.engine_hashes)


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All blocks of this worker rank were removed, in every medium."""

    kind: ClassVar[EventKind] = EventKind.CLEARED

    n_blocks: ClassVar[int] = 0


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Blocks that a worker rank holds, in a snapshot; never published live.

    A snapshot names each block by its *sequence* hash, so it needs no parents and no order. A block that was
    stored ``n`` times is listed ``n`` times, across the events of the snapshot.
    """

    kind: ClassVar[EventKind] = EventKind.HELD

    engine_hashes: HashColumn
    sequence_hashes: HashColumn
    medium: Medium = Medium.GPU

    def __post_init__(self) -> None:
        if len(self.engine_hashes) != len(self.sequence_hashes) or len(self.engine_hashes) % 8:
            raise ValueError(
                "engine_hashes and sequence_hashes: two columns of the same number of 8-byte hashes, "
                f"not {len(self.engine_hashes)} and {len(self.sequence_hashes)} bytes"
            )

    @property
    def n_blocks(self) -> int:
        """The number of listed blocks."""
        return count_hashes(self.engine_hashes)


KvEvent = Stored | Removed | Cleared


def count_blocks(events: Sequence[KvEvent]) -> int:
    """Return how many blocks ``events`` store and remove."""
    return events.n_blocks if isinstance(events, KvEvents) else sum(event.n_blocks for event in events)


def has_cleared(events: Sequence[KvEvent]) -> bool:
    """Whether one of ``events`` is :class:`Cleared`."""
    return events.has_cleared if isinstance(events, KvEvents) else Cleared in map(type, events)


WEIGHT_BLOCKS = 128
"""The blocks that weigh as much as one event: a limit of 8,192 events is one of a million blocks, 16 MiB."""


class KvBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of KV events of a worker rank: event ``i`` has the id ``first_event_id + i``.

    Ids count from 0 within an ``epoch``; a new epoch means that the publisher restarted and holds nothing.
    The ``events`` of a decoded batch are :class:`KvEvents`, or a list where the native core does not read its
    frame; a decoded batch cannot be encoded again.
    ``published_s`` is the sender's wall clock and feeds metrics only. A heartbeat, which has no events,
    reports in ``held_blocks`` how many blocks the rank holds before ``first_event_id``, over all media; None
    when its worker cannot count them.
    """

    rank: WorkerRank
    epoch: Epoch
    first_event_id: EventId
    events: Sequence[KvEvent]
    published_s: float = 0.0
    held_blocks: int | None = None

    @property
    def next_event_id(self) -> EventId:
        """The id that follows this batch."""
        return EventId(self.first_event_id + len(self.events))

    @property
    def weight(self) -> int:
        """The batch's share of a queue's limit: its number of events, at least 1, or one for each
        :data:`WEIGHT_BLOCKS` blocks when that is more.
        """
        return max(1, len(self.events), count_blocks(self.events) // WEIGHT_BLOCKS)


class KvSnapshot(msgspec.Struct, frozen=True):
    """All blocks of one worker rank, in every medium, as of just before ``next_event_id``."""

    rank: WorkerRank
    epoch: Epoch
    next_event_id: EventId
    events: tuple[Held, ...]
