"""A model of :class:`kvrouter._native.PagedKv`, as plain as can be: what it does, the native one has to
do.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from kvrouter.core.events import HashColumn, KvEvent, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import finish64, sequence_hashes
from kvrouter.core.ids import EngineHash
from kvrouter.engines.mock_engine.tokens import MASK, SPREAD

NEVER = -1


class Block:
    """One cached block. ``depth`` is 1 for the first of a sequence; ``released``: when it became unused."""

    __slots__ = (
        "block_hash",
        "children",
        "depth",
        "engine_hash",
        "holders",
        "parent",
        "released",
        "sequence_hash",
    )

    def __init__(
        self, *, parent: "Block | None", block_hash: int, sequence_hash: int, engine_hash: int, depth: int
    ) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.sequence_hash = sequence_hash
        self.engine_hash = engine_hash
        self.depth = depth
        self.children: dict[int, Block] = {}
        self.holders = 0
        self.released = NEVER


class BlockTable:
    """What one sequence holds: its cached blocks from the first on, and then ``n_private`` others."""

    def __init__(self, blocks: list[Block], n_private: int) -> None:
        self.blocks = blocks
        self.n_private = n_private


class PagedKvModel:
    """The contract of the native one."""

    def __init__(self, *, total_blocks: int, opaque: bool, seed: int, caching: bool = True) -> None:
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.idle_blocks = 0
        self.stored_blocks = 0
        self.evicted_blocks = 0
        self._caching = caching
        self._opaque = opaque
        self._tables: dict[int, BlockTable] = {}
        self._handles = count()
        self._names = count(finish64(seed & MASK))
        self._root = Block(parent=None, block_hash=0, sequence_hash=0, engine_hash=0, depth=0)
        self._evictable: list[tuple[int, int, int, Block]] = []
        self._entries = count()
        self._clock = count()
        self._events: list[KvEvent] = []
        self._evicted: list[int] = []

    @property
    def active_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.total_blocks - self.free_blocks - self.idle_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks whose content others can use, idle or held."""
        return self.stored_blocks - self.evicted_blocks

    def matched(self, block_hashes: HashColumn, blocks_max: int) -> int:
        """How many cached blocks begin this sequence, at most ``blocks_max``."""
        return len(self._path(unpack_hashes(block_hashes)[:blocks_max]))

    def hold(self, block_hashes: HashColumn, n_matched: int, n_private: int) -> int | None:
        """Hold cached blocks and allocate private ones; None when they do not fit."""
        matched = self._path(unpack_hashes(block_hashes)[:n_matched])
        woken = sum(1 for block in matched if not block.holders)
        if n_private > self.free_blocks + self.idle_blocks - woken:
            return None
        for block in matched:
            if not block.holders:
                self.idle_blocks -= 1
            block.holders += 1
        handle = next(self._handles)
        self._tables[handle] = BlockTable(matched, 0)
        self.grow(handle, n_private)
        return handle

    def can_grow(self, n_private: int) -> bool:
        """Whether :meth:`grow` would find enough blocks."""
        return n_private <= self.free_blocks + self.idle_blocks

    def grow(self, handle: int, n_private: int) -> int:
        """Allocate ``n_private`` blocks, evicting as needed; MemoryError if none can go."""
        table = self._tables[handle]
        if n_private > self.free_blocks:
            self._evict(n_private - self.free_blocks)
        self.free_blocks -= n_private
        table.n_private += n_private
        return len(table.blocks) + table.n_private

    def commit(self, handle: int, block_hashes: HashColumn, n_full: int) -> None:
        """Cache the private blocks up to the first ``n_full``, or share what another cached meanwhile."""
        table = self._tables[handle]
        hashes = unpack_hashes(block_hashes)[len(table.blocks) : n_full]
        if not self._caching or n_full <= len(table.blocks):
            return
        if len(hashes) > table.n_private or len(hashes) < n_full - len(table.blocks):
            raise KeyError(handle)
        parent = table.blocks[-1] if table.blocks else self._root
        shared = 0
        for block_hash in hashes:
            child = parent.children.get(block_hash)
            if child is None:
                break
            if not child.holders:
                self.idle_blocks -= 1
            child.holders += 1
            self.free_blocks += 1
            table.blocks.append(child)
            parent = child
            shared += 1
        if shared < len(hashes):
            self._store(table, parent, hashes[shared:])
        table.n_private -= len(hashes)

    def release(self, handle: int) -> None:
        """Private blocks are free, cached ones stay until evicted."""
        table = self._tables.pop(handle)
        self.free_blocks += table.n_private
        released = next(self._clock)
        for block in reversed(table.blocks):
            block.holders -= 1
            if not block.holders:
                self.idle_blocks += 1
                block.released = released
                if not block.children:
                    self._offer(block)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what was stored and removed since the last call, in order."""
        self._flush_evicted()
        events = tuple(self._events)
        self._events.clear()
        return events

    def snapshot(self) -> tuple[Stored, ...]:
        """Return all cached blocks as stores, parents first."""
        events: list[Stored] = []
        starts = list(self._root.children.values())
        while starts:
            block = starts.pop()
            run = [block]
            while block.children:
                first, *others = block.children.values()
                starts.extend(others)
                run.append(first)
                block = first
            events.append(_stored(run))
        return tuple(events)

    def _path(self, block_hashes: Sequence[int]) -> list[Block]:
        found: list[Block] = []
        block = self._root
        for block_hash in block_hashes:
            child = block.children.get(block_hash)
            if child is None:
                break
            found.append(child)
            block = child
        return found

    def _store(self, table: BlockTable, parent: Block, block_hashes: Sequence[int]) -> None:
        if parent is self._root:
            chained = unpack_hashes(sequence_hashes(pack_hashes(block_hashes)))
        else:
            chained = unpack_hashes(sequence_hashes(pack_hashes((parent.sequence_hash, *block_hashes))))[1:]
        run: list[Block] = []
        for block_hash, sequence_hash in zip(block_hashes, chained, strict=True):
            child = Block(
                parent=parent,
                block_hash=block_hash,
                sequence_hash=sequence_hash,
                engine_hash=finish64(next(self._names) & MASK) if self._opaque else sequence_hash ^ SPREAD,
                depth=parent.depth + 1,
            )
            child.holders = 1
            parent.children[block_hash] = child
            run.append(child)
            parent = child
        table.blocks.extend(run)
        self.stored_blocks += len(run)
        self._flush_evicted()
        self._events.append(_stored(run))

    def _evict(self, n_blocks: int) -> None:
        if n_blocks > self.idle_blocks:
            raise MemoryError(f"{n_blocks} blocks wanted, {self.idle_blocks} can be evicted")
        for _ in range(n_blocks):
            block = self._least_recent_leaf()
            parent = block.parent
            block.released = NEVER
            self._evicted.append(block.engine_hash)
            if parent is not None and parent is not self._root:
                del parent.children[block.block_hash]
                if not parent.children and not parent.holders:
                    self._offer(parent)
            else:
                del self._root.children[block.block_hash]
        self.idle_blocks -= n_blocks
        self.free_blocks += n_blocks
        self.evicted_blocks += n_blocks

    def _least_recent_leaf(self) -> Block:
        while True:
            released, _, _, block = heappop(self._evictable)
            if _can_evict(block, released):
                return block

    def _offer(self, leaf: Block) -> None:
        heappush(self._evictable, (leaf.released, -leaf.depth, next(self._entries), leaf))

    def _flush_evicted(self) -> None:
        if self._evicted:
            self._events.append(Removed(engine_hashes=pack_hashes(self._evicted)))
            self._evicted = []


def _can_evict(block: Block, released: int) -> bool:
    """True when nobody held the block since it was offered, so that it is a leaf still."""
    return not block.holders and block.released == released


def _stored(run: Sequence[Block]) -> Stored:
    parent = run[0].parent
    return Stored(
        parent=EngineHash(parent.engine_hash) if parent is not None and parent.depth else None,
        engine_hashes=pack_hashes(block.engine_hash for block in run),
        block_hashes=pack_hashes(block.block_hash for block in run),
    )
