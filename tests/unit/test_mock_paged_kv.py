import pytest

from kvrouter.core.events import KvEvent, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import sequence_hashes
from kvrouter.mock.config import EngineHashing
from kvrouter.mock.paged_kv import BlockTable, PagedKv


def paged_kv(
    total_blocks: int = 8, *, hashing: EngineHashing = EngineHashing.DETERMINISTIC, seed: int = 0
) -> PagedKv:
    return PagedKv(total_blocks=total_blocks, engine_hashing=hashing, seed=seed)


def compute(kv: PagedKv, *hashes: int) -> BlockTable:
    """A sequence of full blocks is admitted and computed, as a scheduler would do it."""
    matched = kv.match(hashes, len(hashes))
    n_matched = len(matched)
    table = kv.hold(matched, len(hashes) - n_matched)
    kv.commit(table, hashes[n_matched:])
    return table


def stored_and_removed(events: tuple[KvEvent, ...]) -> tuple[list[int], list[int]]:
    stored = [h for e in events if isinstance(e, Stored) for h in unpack_hashes(e.block_hashes)]
    removed = [h for e in events if isinstance(e, Removed) for h in unpack_hashes(e.engine_hashes)]
    return stored, removed


def test_consecutive_blocks_are_one_event_with_their_parent() -> None:
    kv = paged_kv()
    table = compute(kv, 1, 2, 3)
    (first,) = kv.take_events()
    assert isinstance(first, Stored)
    assert first.parent is None
    assert unpack_hashes(first.block_hashes) == (1, 2, 3)
    kv.grow(table, 1)
    kv.commit(table, [4])
    (second,) = kv.take_events()
    assert isinstance(second, Stored)
    assert second.parent == unpack_hashes(first.engine_hashes)[2]


def test_a_cached_prefix_is_shared_and_not_stored_again() -> None:
    kv = paged_kv()
    compute(kv, 1, 2, 3)
    kv.take_events()
    assert len(kv.match([1, 2, 9], 3)) == 2
    compute(kv, 1, 2, 9)
    assert stored_and_removed(kv.take_events())[0] == [9]
    assert kv.free_blocks == 4


def test_two_that_computed_the_same_block_share_it_in_the_end() -> None:
    kv = paged_kv()
    tables = [kv.hold([], 2), kv.hold([], 2)]
    for table in tables:
        kv.commit(table, [1, 2])
    assert stored_and_removed(kv.take_events())[0] == [1, 2]
    assert kv.free_blocks == 6
    assert kv.check_integrity(tables) == []


def test_eviction_takes_the_least_recent_leaf_and_then_its_parent() -> None:
    kv = paged_kv(6)
    old = compute(kv, 1, 2)
    new = compute(kv, 1, 3)
    other = compute(kv, 7)
    names = {block.block_hash: block.engine_hash for t in (old, new, other) for block in t.blocks}
    for table in (old, other, new):
        kv.release(table)
    kv.take_events()
    removed: list[int] = []
    for _ in range(4):
        kv.grow(BlockTable([], 0), kv.free_blocks + 1)
        removed += stored_and_removed(kv.take_events())[1]
    # 2 was let go first, then 7, then 3; their parent 1 goes last, although its holder was there before 7's.
    assert removed == [names[h] for h in (2, 7, 3, 1)]


def test_deepest_first_among_blocks_that_were_let_go_together() -> None:
    kv = paged_kv(3)
    table = compute(kv, 1, 2, 3)
    names = [block.engine_hash for block in table.blocks]
    kv.release(table)
    kv.take_events()
    kv.grow(BlockTable([], 0), 3)
    assert stored_and_removed(kv.take_events())[1] == names[::-1]


def test_what_somebody_holds_is_never_evicted() -> None:
    kv = paged_kv(4)
    held = compute(kv, 1, 2)
    kv.release(compute(kv, 1, 2, 3))
    assert kv.can_grow(2)
    assert not kv.can_grow(3)
    kv.grow(BlockTable([], 0), 2)
    with pytest.raises(MemoryError):
        kv.grow(BlockTable([], 0), 1)
    assert len(kv.match([1, 2, 3], 3)) == 2
    assert len(held.blocks) == 2


def test_matched_blocks_do_not_count_as_room() -> None:
    kv = paged_kv(2)
    kv.release(compute(kv, 1, 2))
    matched = kv.match([1], 1)
    assert kv.can_hold(matched, 1)
    assert not kv.can_hold(matched, 2)


def test_removals_come_before_the_stores_that_needed_the_room() -> None:
    kv = paged_kv(1)
    kv.release(compute(kv, 1))
    kv.release(compute(kv, 2))
    assert [type(event) for event in kv.take_events()] == [Stored, Removed, Stored]


def test_deterministic_names_are_alike_everywhere_and_opaque_ones_are_not() -> None:
    def names(hashing: EngineHashing, seed: int) -> list[int]:
        kv = paged_kv(hashing=hashing, seed=seed)
        return [block.engine_hash for block in compute(kv, 1, 2).blocks]

    assert names(EngineHashing.DETERMINISTIC, 1) == names(EngineHashing.DETERMINISTIC, 2)
    assert not set(names(EngineHashing.OPAQUE, 1)) & set(names(EngineHashing.OPAQUE, 2))


def test_opaque_names_are_never_used_twice() -> None:
    kv = paged_kv(2, hashing=EngineHashing.OPAQUE)
    seen: set[int] = set()
    for _ in range(3):
        for hashes in ((1, 2), (3, 4)):
            table = compute(kv, *hashes)
            assert not seen & {block.engine_hash for block in table.blocks}
            seen |= {block.engine_hash for block in table.blocks}
            kv.release(table)


def test_the_sequence_hash_is_the_one_that_routers_compute() -> None:
    kv = paged_kv()
    table = compute(kv, 5, 6)
    kv.grow(table, 1)
    kv.commit(table, [7])
    expected = unpack_hashes(sequence_hashes(pack_hashes([5, 6, 7])))
    assert tuple(block.sequence_hash for block in table.blocks) == expected


def test_a_snapshot_tells_parents_first() -> None:
    kv = paged_kv(16)
    for hashes in ((1, 2, 3), (1, 2, 4, 5), (6,)):
        compute(kv, *hashes)
    known: set[int | None] = {None}
    stored: list[int] = []
    for event in kv.snapshot():
        assert event.parent in known
        known |= set(unpack_hashes(event.engine_hashes))
        stored += unpack_hashes(event.block_hashes)
    assert sorted(stored) == [1, 2, 3, 4, 5, 6]


def test_stale_entries_are_swept() -> None:
    kv = paged_kv(4)
    kv.release(compute(kv, 1, 2))
    for _ in range(5_000):
        kv.release(compute(kv, 1, 2))
    assert len(kv._evictable) < 1_100
    kv.grow(BlockTable([], 0), 4)
    assert kv.idle_blocks == 0
