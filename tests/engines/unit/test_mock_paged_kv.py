from collections.abc import Iterable

import pytest

from kvrouter._native import PagedKv
from kvrouter.core.events import KvEvent, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import sequence_hashes


def paged_kv(total_blocks: int = 8, *, opaque: bool = False, seed: int = 0) -> PagedKv:
    return PagedKv(total_blocks=total_blocks, opaque=opaque, seed=seed)


def compute(kv: PagedKv, *hashes: int) -> int:
    """A sequence of full blocks is admitted and computed, as a scheduler would do it."""
    column = pack_hashes(hashes)
    n_matched = kv.matched(column, len(hashes))
    table = hold(kv, len(hashes) - n_matched, hashes[:n_matched])
    kv.commit(table, column, len(hashes))
    return table


def hold(kv: PagedKv, n_private: int, matched: tuple[int, ...] = ()) -> int:
    table = kv.hold(pack_hashes(matched), len(matched), n_private)
    assert table is not None
    return table


def stored_and_removed(events: Iterable[KvEvent]) -> tuple[list[int], list[int]]:
    given = tuple(events)
    stored = [h for e in given if isinstance(e, Stored) for h in unpack_hashes(e.block_hashes)]
    removed = [h for e in given if isinstance(e, Removed) for h in unpack_hashes(e.engine_hashes)]
    return stored, removed


def engine_names(kv: PagedKv) -> dict[int, int]:
    """Of each block hash stored since the last call, the engine's name."""
    return {
        block_hash: name
        for event in kv.take_events()
        if isinstance(event, Stored)
        for block_hash, name in zip(
            unpack_hashes(event.block_hashes), unpack_hashes(event.engine_hashes), strict=True
        )
    }


def test_consecutive_blocks_are_one_event_with_their_parent() -> None:
    kv = paged_kv()
    table = compute(kv, 1, 2, 3)
    (first,) = kv.take_events()
    assert isinstance(first, Stored)
    assert first.parent is None
    assert unpack_hashes(first.block_hashes) == (1, 2, 3)
    assert kv.grow(table, 1) == 4
    kv.commit(table, pack_hashes([1, 2, 3, 4]), 4)
    (second,) = kv.take_events()
    assert isinstance(second, Stored)
    assert second.parent == unpack_hashes(first.engine_hashes)[2]


def test_a_cached_prefix_is_shared_and_not_stored_again() -> None:
    kv = paged_kv()
    compute(kv, 1, 2, 3)
    kv.take_events()
    assert kv.matched(pack_hashes([1, 2, 9]), 3) == 2
    compute(kv, 1, 2, 9)
    assert stored_and_removed(kv.take_events())[0] == [9]
    assert kv.free_blocks == 4


def test_equal_blocks_computed_twice_are_shared_afterwards() -> None:
    kv = paged_kv()
    tables = [hold(kv, 2), hold(kv, 2)]
    for table in tables:
        kv.commit(table, pack_hashes([1, 2]), 2)
    assert stored_and_removed(kv.take_events())[0] == [1, 2]
    assert kv.free_blocks == 6
    assert kv.check_integrity(list(tables)) == []


def test_eviction_takes_the_least_recent_leaf_and_then_its_parent() -> None:
    kv = paged_kv(6)
    old = compute(kv, 1, 2)
    new = compute(kv, 1, 3)
    other = compute(kv, 7)
    names = engine_names(kv)
    for table in (old, other, new):
        kv.release(table)
    removed: list[int] = []
    grown = hold(kv, 0)
    for _ in range(4):
        kv.grow(grown, kv.free_blocks + 1)
        removed += stored_and_removed(kv.take_events())[1]
    # 2 was let go first, then 7, then 3; their parent 1 goes last, although its holder was there before 7's.
    assert removed == [names[h] for h in (2, 7, 3, 1)]


def test_blocks_released_together_are_evicted_deepest_first() -> None:
    kv = paged_kv(3)
    kv.release(compute(kv, 1, 2, 3))
    names = engine_names(kv)
    hold(kv, 3)
    assert stored_and_removed(kv.take_events())[1] == [names[3], names[2], names[1]]


def test_held_blocks_are_never_evicted() -> None:
    kv = paged_kv(4)
    held = compute(kv, 1, 2)
    kv.release(compute(kv, 1, 2, 3))
    assert kv.can_grow(2)
    assert not kv.can_grow(3)
    other = hold(kv, 2)
    with pytest.raises(MemoryError, match="1 blocks wanted, 0 can be evicted"):
        kv.grow(other, 1)
    assert kv.matched(pack_hashes([1, 2, 3]), 3) == 2
    assert kv.check_integrity([held, other]) == []


def test_matched_blocks_do_not_count_as_room() -> None:
    kv = paged_kv(2)
    kv.release(compute(kv, 1, 2))
    assert kv.hold(pack_hashes([1]), 1, 2) is None
    assert kv.hold(pack_hashes([1]), 1, 1) is not None


def test_removals_come_before_the_stores_that_needed_the_room() -> None:
    kv = paged_kv(1)
    kv.release(compute(kv, 1))
    kv.release(compute(kv, 2))
    assert [type(event) for event in kv.take_events()] == [Stored, Removed, Stored]


def test_only_opaque_block_names_depend_on_the_seed() -> None:
    def names(*, opaque: bool, seed: int) -> list[int]:
        kv = paged_kv(opaque=opaque, seed=seed)
        compute(kv, 1, 2)
        return list(engine_names(kv).values())

    assert names(opaque=False, seed=1) == names(opaque=False, seed=2)
    assert not set(names(opaque=True, seed=1)) & set(names(opaque=True, seed=2))


def test_opaque_block_names_are_never_reused() -> None:
    kv = paged_kv(2, opaque=True)
    seen: set[int] = set()
    for _ in range(3):
        for hashes in ((1, 2), (3, 4)):
            kv.release(compute(kv, *hashes))
            names = set(engine_names(kv).values())
            assert len(names) == 2
            assert not seen & names
            seen |= names


def test_deterministic_names_follow_from_the_sequence_hash() -> None:
    def named(*hashes: int) -> dict[int, int]:
        kv = paged_kv()
        compute(kv, *hashes)
        return engine_names(kv)

    chained = unpack_hashes(sequence_hashes(pack_hashes([5, 6])))
    spread = named(5, 6)[5] ^ chained[0]
    assert named(5, 6)[6] ^ chained[1] == spread
    assert named(4, 6)[6] != named(5, 6)[6]


def test_snapshot_lists_parents_before_children() -> None:
    kv = paged_kv(16)
    for hashes in ((1, 2, 3), (1, 2, 4, 5), (6,)):
        compute(kv, *hashes)
    known: set[int | None] = {None}
    stored: list[int] = []
    for event in kv.snapshot():
        assert isinstance(event, Stored)
        assert event.parent in known
        known |= set(unpack_hashes(event.engine_hashes))
        stored += unpack_hashes(event.block_hashes)
    assert sorted(stored) == [1, 2, 3, 4, 5, 6]


def test_stale_eviction_entries_are_removed() -> None:
    kv = paged_kv(4)
    for _ in range(5_000):
        kv.release(compute(kv, 1, 2))
    assert kv.n_offers < 1_100
    hold(kv, 4)
    assert kv.idle_blocks == 0


def test_a_table_that_is_not_held_is_refused() -> None:
    kv = paged_kv()
    table = compute(kv, 1)
    kv.release(table)
    for use in (lambda: kv.release(table), lambda: kv.grow(table, 1), lambda: kv.commit(table, b"", 1)):
        with pytest.raises(KeyError, match=f"table {table}"):
            use()
    with pytest.raises(ValueError, match="block_hashes: a column of 8-byte hashes, not 7 bytes"):
        kv.matched(b"1234567", 1)


def test_integrity_check_reports_tables_not_accounted_for() -> None:
    kv = paged_kv()
    table = compute(kv, 1, 2)
    assert kv.check_integrity([table]) == []
    assert any("held by nobody" in problem for problem in kv.check_integrity([]))
    assert any("is not held" in problem for problem in kv.check_integrity([table, 99]))


def test_native_events_behave_as_a_tuple() -> None:
    kv = paged_kv(3)
    for hashes in ((1, 2), (3,), (4, 5)):
        kv.release(compute(kv, *hashes))
    native = kv.take_events()
    events = tuple(native)
    assert [type(event) for event in events] == [Stored, Stored, Removed, Stored]
    assert len(native) == 4
    assert [native[at] for at in range(-4, 4)] == [*events, *events]
    for part in (slice(1, None), slice(None, None, -2), slice(3, 1)):
        assert native[part] == events[part]
    for beyond in (4, -5):
        with pytest.raises(IndexError, match=f"event {beyond} of 4"):
            native[beyond]
    assert tuple(kv.take_events()) == ()
