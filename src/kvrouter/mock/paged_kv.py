"""The KV events of a mock engine's paged memory, made of the rows that the native core gives.

The memory itself is in the native core, with the schedulers: `native/core/src/paged_kv.rs`.
"""

from collections.abc import Iterable
from typing import TypeAlias

from kvrouter.core.events import HashColumn, KvEvent, Removed, Stored
from kvrouter.core.ids import EngineHash

KvRow: TypeAlias = tuple[int | None, HashColumn, HashColumn | None]
"""Parent, engine hashes and block hashes of what was stored; no block hashes for what was removed."""


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
