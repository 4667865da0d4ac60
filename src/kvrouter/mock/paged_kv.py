"""Paged KV memory of one rank: a prefix cache of shared blocks, evicted leaf first, least recent first.

A block is private while it fills, and cached once it is full: then any sequence that begins with the same
tokens may hold it. Cached blocks form a tree (a block's parent is the block before it). A sequence holds
every block on its path, so a block that nobody holds has no descendant that somebody holds, and what can be
evicted is always at the leaves.

The memory itself is in the native core: at a block size of 16 it does most of an engine's work.
"""

from collections.abc import Iterable
from typing import NewType, TypeAlias

from kvrouter import _native
from kvrouter.core.events import HashColumn, KvEvent, Removed, Stored
from kvrouter.core.ids import EngineHash

TableId = NewType("TableId", int)
"""What one sequence holds: its cached blocks from the first on, and then private ones."""


KvRow: TypeAlias = tuple[int | None, HashColumn, HashColumn | None]
"""Parent, engine hashes and block hashes of what was stored; no block hashes for what was removed."""


class PagedKv(_native.PagedKv):
    """The KV memory of one rank: ``total_blocks`` blocks, each free, private, or cached."""

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what was stored and removed since the last call, in order."""
        return to_events(self.take_rows())

    def snapshot(self) -> tuple[Stored, ...]:
        """Return all cached blocks as stores, parents first."""
        return to_stores(self.snapshot_rows())


def to_events(rows: Iterable[KvRow]) -> tuple[KvEvent, ...]:
    """Return the events of the native core's rows."""
    return tuple(
        Removed(engine_hashes)
        if block_hashes is None
        else Stored(None if parent is None else EngineHash(parent), engine_hashes, block_hashes)
        for parent, engine_hashes, block_hashes in rows
    )


def to_stores(rows: Iterable[KvRow]) -> tuple[Stored, ...]:
    """Return the stores among the native core's rows."""
    return tuple(event for event in to_events(rows) if isinstance(event, Stored))
