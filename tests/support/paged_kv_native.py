"""The native KV memory of one rank on its own, as the schedulers of the native core use it."""

from typing import NewType

from kvrouter import _native
from kvrouter.core.events import KvEvent, Stored
from kvrouter.mock.paged_kv import to_events, to_stores

TableId = NewType("TableId", int)
"""What one sequence holds: its cached blocks from the first on, and then private ones."""


class PagedKv(_native.PagedKv):
    """``total_blocks`` blocks, each free, private, or cached."""

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what was stored and removed since the last call, in order."""
        return to_events(self.take_rows())

    def snapshot(self) -> tuple[Stored, ...]:
        """Return all cached blocks as stores, parents first."""
        return to_stores(self.snapshot_rows())
