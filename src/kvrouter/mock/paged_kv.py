"""Paged KV memory of one rank: a prefix cache of shared blocks, evicted leaf first, least recent first.

A block is private while it fills, and cached once it is full: then any sequence that begins with the same
tokens may hold it. Cached blocks form a tree (a block's parent is the block before it). A sequence holds
every block on its path, so a block that nobody holds has no descendant that somebody holds, and what can be
evicted is always at the leaves.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from kvrouter.core.events import KvEvent, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import sequence_hashes
from kvrouter.core.ids import EngineHash
from kvrouter.fleet import finish64
from kvrouter.mock.config import EngineHashing
from kvrouter.mock.tokens import MASK, SPREAD

NEVER = -1
STALE_ENTRIES_MAX = 1_024


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

    __slots__ = ("blocks", "n_private")

    def __init__(self, blocks: list[Block], n_private: int) -> None:
        self.blocks = blocks
        self.n_private = n_private

    @property
    def n_blocks(self) -> int:
        """All blocks held."""
        return len(self.blocks) + self.n_private


class PagedKv:
    """The KV memory of one rank: ``total_blocks`` blocks, each free, private, or cached."""

    def __init__(
        self, *, total_blocks: int, engine_hashing: EngineHashing, seed: int, caching: bool = True
    ) -> None:
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.idle_blocks = 0
        self.stored_blocks = 0
        self.evicted_blocks = 0
        self._caching = caching
        self._opaque = engine_hashing is EngineHashing.OPAQUE
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

    def match(self, block_hashes: Sequence[int], blocks_max: int) -> list[Block]:
        """Return the cached blocks that begin this sequence, at most ``blocks_max`` of them."""
        found: list[Block] = []
        if not self._caching:
            return found
        block = self._root
        for index in range(min(blocks_max, len(block_hashes))):
            child = block.children.get(block_hashes[index])
            if child is None:
                break
            found.append(child)
            block = child
        return found

    def can_hold(self, matched: Sequence[Block], n_private: int) -> bool:
        """Return whether :meth:`hold` would find enough blocks."""
        woken = sum(1 for block in matched if not block.holders)
        return n_private <= self.free_blocks + self.idle_blocks - woken

    def hold(self, matched: list[Block], n_private: int) -> BlockTable:
        """Hold the ``matched`` blocks and allocate ``n_private`` more, evicting as needed."""
        for block in matched:
            if not block.holders:
                self.idle_blocks -= 1
            block.holders += 1
        table = BlockTable(matched, 0)
        self.grow(table, n_private)
        return table

    def can_grow(self, n_private: int) -> bool:
        """Return whether :meth:`grow` would find enough blocks."""
        return n_private <= self.free_blocks + self.idle_blocks

    def grow(self, table: BlockTable, n_private: int) -> None:
        """Allocate ``n_private`` blocks for ``table``, evicting as needed; MemoryError if none can go."""
        if n_private > self.free_blocks:
            self._evict(n_private - self.free_blocks)
        self.free_blocks -= n_private
        table.n_private += n_private

    def commit(self, table: BlockTable, block_hashes: Sequence[int]) -> None:
        """Cache the next private blocks of ``table``, which are full and have these block hashes.

        A block that another sequence cached meanwhile is shared instead, and the private one is free again.
        """
        if not self._caching:
            return
        parent = table.blocks[-1] if table.blocks else self._root
        shared = 0
        for block_hash in block_hashes:
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
        if shared < len(block_hashes):
            self._store(table, parent, block_hashes[shared:])
        table.n_private -= len(block_hashes)

    def release(self, table: BlockTable) -> None:
        """Give up every block of ``table``: private ones are free, cached ones stay until evicted."""
        self.free_blocks += table.n_private
        released = next(self._clock)
        for block in reversed(table.blocks):
            block.holders -= 1
            if not block.holders:
                self.idle_blocks += 1
                block.released = released
                if not block.children:
                    self._offer(block)
        table.blocks = []
        table.n_private = 0

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

    def check_integrity(self, tables: Iterable[BlockTable]) -> list[str]:
        """Return every way in which the books differ from ``tables``, which is all that holds blocks."""
        holders: dict[int, int] = {}
        n_private = 0
        for table in tables:
            n_private += table.n_private
            for block in table.blocks:
                holders[id(block)] = holders.get(id(block), 0) + 1
        problems: list[str] = []
        n_cached = n_idle = 0
        blocks = list(self._root.children.values())
        while blocks:
            block = blocks.pop()
            blocks.extend(block.children.values())
            n_cached += 1
            n_idle += not block.holders
            if block.holders != holders.pop(id(block), 0):
                problems.append(f"block {block.engine_hash:#x} counts {block.holders} holders")
        if holders:
            problems.append(f"{len(holders)} held blocks are not in the cache")
        if n_idle != self.idle_blocks:
            problems.append(f"{n_idle} cached blocks are idle, the books say {self.idle_blocks}")
        if n_cached != self.cached_blocks:
            problems.append(f"{n_cached} blocks are cached, the books say {self.cached_blocks}")
        free = self.total_blocks - n_cached - n_private
        if free != self.free_blocks or free < 0:
            problems.append(f"{free} blocks are free, the books say {self.free_blocks}")
        return problems

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
        if len(self._evictable) > 2 * self.idle_blocks + STALE_ENTRIES_MAX:
            self._evictable = [entry for entry in self._evictable if _can_evict(entry[3], entry[0])]
            heapify(self._evictable)

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
