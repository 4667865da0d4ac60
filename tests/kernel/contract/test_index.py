"""What every block index does."""

from collections.abc import Callable

import numpy as np
import pytest

from kvrouter.core.events import Cleared, Held, Medium, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import EngineHash, Slot
from kvrouter.kernel.index import BlockIndex, NativeBlockIndex
from tests.oracles.index import NaiveBlockIndex

MAKERS = [NaiveBlockIndex, NativeBlockIndex]
A, B, C = Slot(0), Slot(1), Slot(700)


@pytest.fixture(params=MAKERS, ids=["naive", "native"])
def make(request: pytest.FixtureRequest) -> Callable[..., BlockIndex]:
    maker: Callable[..., BlockIndex] = request.param
    return maker


@pytest.fixture
def index(make: Callable[..., BlockIndex]) -> BlockIndex:
    return make()


def prompt(n_blocks: int, *, first: int = 0) -> Prompt:
    return Prompt(list(range(first, first + 2 * n_blocks)), block_size=2)


def stored(
    names: list[int],
    of: Prompt,
    begin: int = 0,
    parent: int | None = None,
    medium: Medium = Medium.GPU,
) -> Stored:
    blocks = of.block_hashes[8 * begin : 8 * (begin + len(names))]
    return Stored(None if parent is None else EngineHash(parent), pack_hashes(names), blocks, medium)


def removed(*names: int, medium: Medium = Medium.GPU) -> Removed:
    return Removed(pack_hashes(names), medium)


def overlap(index: BlockIndex, of: Prompt, medium: Medium = Medium.GPU) -> dict[int, int]:
    out = np.full(1000, 99, np.uint32)
    index.overlap(of, out, medium)
    return {int(slot): int(out[slot]) for slot in np.flatnonzero(out)}


def test_an_empty_index_has_no_overlap_and_no_blocks(index: BlockIndex) -> None:
    assert overlap(index, prompt(3)) == {}
    assert overlap(index, prompt(0)) == {}
    assert index.held(A) == 0
    assert index.drop_some(A).cleared == 0
    assert index.dump_some(A) is None
    assert index.dump(A) == []
    assert index.stats().ranks == 0


def test_overlap_is_the_longest_contiguous_prefix_of_each_slot(index: BlockIndex) -> None:
    p = prompt(4)
    index.apply(A, [stored([1, 2, 3, 4], p)])
    index.apply(B, [stored([1, 2], p)])
    index.apply(C, [stored([9, 8, 7, 6], prompt(4, first=100))])
    assert overlap(index, p) == {A: 4, B: 2}
    assert overlap(index, prompt(6)) == {A: 4, B: 2}
    assert overlap(index, prompt(1)) == {A: 1, B: 1}


def test_a_store_continues_from_its_parent(index: BlockIndex) -> None:
    p = prompt(4)
    index.apply(A, [stored([1, 2], p), stored([3, 4], p, 2, parent=2)])
    assert overlap(index, p) == {A: 4}


def test_engine_hashes_are_separate_for_each_rank(index: BlockIndex) -> None:
    p, other = prompt(2), prompt(2, first=50)
    index.apply(A, [stored([1, 2], p)])
    index.apply(B, [stored([1, 2], other)])
    assert overlap(index, p) == {A: 2}
    assert overlap(index, other) == {B: 2}
    index.apply(A, [removed(1)])
    assert overlap(index, other) == {B: 2}


@pytest.mark.parametrize("name", [0, 1, 2**63, 2**64 - 1])
def test_any_64_bit_engine_hash_is_accepted(index: BlockIndex, name: int) -> None:
    p = prompt(2)
    index.apply(A, [stored([name], p), stored([77], p, 1, parent=name)])
    assert overlap(index, p) == {A: 2}
    assert unpack_hashes(index.dump(A)[0].engine_hashes) == tuple(sorted((name, 77)))
    assert index.apply(A, [removed(name)]).removed == 1
    assert overlap(index, p) == {}


def test_a_store_with_an_unknown_parent_is_an_orphan_and_not_indexed(index: BlockIndex) -> None:
    p = prompt(3)
    applied = index.apply(A, [stored([2, 3], p, 1, parent=1)])
    assert (applied.orphaned, applied.stored) == (2, 0)
    assert index.held(A) == 0
    index.apply(B, [stored([1], p)])
    assert index.apply(A, [stored([2, 3], p, 1, parent=1)]).orphaned == 2


def test_a_parent_may_live_in_another_medium(index: BlockIndex) -> None:
    p = prompt(2)
    index.apply(A, [stored([1], p, medium=Medium.CPU)])
    assert index.apply(A, [stored([2], p, 1, parent=1)]).stored == 1
    assert overlap(index, p) == {}
    index.apply(A, [stored([1], p)])
    assert overlap(index, p) == {A: 2}


def test_media_are_kept_apart(index: BlockIndex) -> None:
    p = prompt(2)
    index.apply(A, [stored([1, 2], p), stored([1], p, medium=Medium.DISK)])
    assert overlap(index, p) == {A: 2}
    assert overlap(index, p, Medium.DISK) == {A: 1}
    assert overlap(index, p, Medium.CPU) == {}
    index.apply(A, [removed(1, 2)])
    assert overlap(index, p) == {}
    assert overlap(index, p, Medium.DISK) == {A: 1}
    assert (index.held(A), index.held(A, Medium.DISK)) == (0, 1)
    assert index.stats().blocks == (0, 0, 1, 0)
    assert index.stats().ranks == 1


def test_a_block_stored_three_times_needs_three_removals(index: BlockIndex) -> None:
    p = prompt(1)
    applied = index.apply(A, [stored([1], p)] * 3)
    assert (applied.stored, applied.repeated) == (1, 2)
    for left in (1, 1, 0):
        assert index.apply(A, [removed(1)]).removed == 1
        assert overlap(index, p) == ({A: 1} if left else {})
    assert index.apply(A, [removed(1)]).unknown_removed == 1


def test_a_removed_middle_block_ends_the_overlap_until_stored_again(index: BlockIndex) -> None:
    p = prompt(4)
    index.apply(A, [stored([1, 2, 3, 4], p)])
    index.apply(B, [stored([1, 2, 3, 4], p)])
    index.apply(A, [removed(2)])
    assert overlap(index, p) == {A: 1, B: 4}
    assert index.held(A) == 3
    index.apply(A, [stored([2], p, 1, parent=1)])
    assert overlap(index, p) == {A: 4, B: 4}


def test_a_block_with_two_engine_hashes_stays_until_both_are_removed(index: BlockIndex) -> None:
    p = prompt(1)
    assert index.apply(A, [stored([1], p), stored([2], p)]).stored == 2
    index.apply(A, [removed(1)])
    assert overlap(index, p) == {A: 1}
    index.apply(A, [removed(2)])
    assert overlap(index, p) == {}
    assert index.stats().sequences == (0, 0, 0, 0)


def test_an_engine_hash_stored_with_new_content_replaces_the_old(index: BlockIndex) -> None:
    p, other = prompt(1), prompt(1, first=50)
    index.apply(A, [stored([1], p), stored([1], p)])
    assert index.apply(A, [stored([1], other)]).replaced == 1
    assert overlap(index, p) == {}
    assert overlap(index, other) == {A: 1}
    index.apply(A, [removed(1)])
    assert index.held(A) == 0


def test_cleared_empties_one_rank_in_every_medium(index: BlockIndex) -> None:
    p = prompt(2)
    index.apply(A, [stored([1, 2], p), stored([1], p, medium=Medium.CPU)])
    index.apply(B, [stored([1, 2], p)])
    assert index.apply(A, [Cleared()]).cleared == 3
    assert overlap(index, p) == {B: 2}
    assert overlap(index, p, Medium.CPU) == {}
    assert index.apply(A, [stored([2], p, 1, parent=1)]).orphaned == 1


def test_a_rank_loaded_from_a_snapshot_is_equal(make: Callable[..., BlockIndex]) -> None:
    p = prompt(4)
    index = make()
    index.apply(A, [stored([1, 2, 3, 4], p), stored([2, 3], p, 1, parent=1), removed(4)])
    index.apply(A, [stored([2**64 - 1], p, medium=Medium.EXTERNAL)])
    snapshot = index.dump(A)
    assert sum(event.n_blocks for event in snapshot) == 6
    for other in (make(), index):
        applied = other.apply(C, [Cleared(), *snapshot])
        assert (applied.stored, applied.repeated) == (4, 2)
        assert other.dump(C) == snapshot
        other.apply(C, [removed(2, 3)])
        assert overlap(other, p).get(C) == 3
        other.apply(C, [removed(2, 3)])
        assert overlap(other, p).get(C) == 1
        assert overlap(other, p, Medium.EXTERNAL).get(C) == 1


def test_a_rank_is_dumped_and_dropped_in_parts(make: Callable[..., BlockIndex]) -> None:
    n_blocks = 20_000
    names, sequences = (np.arange(n_blocks, dtype=np.uint64) * 3 + first for first in (5, 7))
    index, other = make(), make()
    for medium in (Medium.GPU, Medium.DISK):
        index.apply(A, [Held(names.tobytes(), sequences.tobytes(), medium)])
    index.apply(A, [Held(names[:9].tobytes(), sequences[:9].tobytes())])
    index.apply(B, [Held(names.tobytes(), sequences.tobytes())])
    place = 0
    while (some := index.dump_some(A, place)) is not None:
        events, place = some
        other.apply(C, events)
    assert other.dump(C) == index.dump(A)
    dropped = []
    while (applied := index.drop_some(A)).cleared:
        dropped.append(applied.cleared)
        assert sum(dropped) + index.held(A) + index.held(A, Medium.DISK) == 2 * n_blocks
    assert (len(dropped) > 1, sum(dropped)) == (True, 2 * n_blocks)
    assert index.dump(A) == []
    assert index.stats().blocks == (n_blocks, 0, 0, 0), "nobody else's blocks went"


def test_a_store_finds_a_parent_loaded_from_a_snapshot(index: BlockIndex) -> None:
    p = prompt(3)
    index.apply(A, [Held(pack_hashes([5, 6]), p.sequence_hashes[:16])])
    assert index.apply(A, [stored([7], p, 2, parent=6)]).stored == 1
    assert overlap(index, p) == {A: 3}


def test_a_rank_holds_no_more_than_its_limit(make: Callable[..., BlockIndex]) -> None:
    p = prompt(4)
    index = make(blocks_per_rank_max=2)
    applied = index.apply(A, [stored([1, 2, 3], p), stored([1], p)])
    assert (applied.stored, applied.over_limit, applied.repeated) == (2, 1, 1)
    assert overlap(index, p) == {A: 2}


def test_overlap_is_right_for_a_prompt_held_by_300_slots(index: BlockIndex) -> None:
    p = prompt(8)
    for slot in range(0, 900, 3):
        index.apply(Slot(slot), [stored(list(range(1 + slot % 8)), p)])
    assert overlap(index, p) == {slot: 1 + slot % 8 for slot in range(0, 900, 3)}
    for slot in range(0, 900, 6):
        index.apply(Slot(slot), [Cleared()])
    assert overlap(index, p) == {slot: 1 + slot % 8 for slot in range(3, 900, 6)}


def test_an_overlap_array_shorter_than_the_slots_in_use_is_refused(index: BlockIndex) -> None:
    p = prompt(1)
    index.apply(C, [stored([1], p)])
    with pytest.raises(ValueError, match="out: a place for each of the 701 slots in use, not 700"):
        index.overlap(p, np.zeros(700, np.uint32))
    index.overlap(p, np.zeros(701, np.uint32))
    index.apply(C, [Cleared()])
    index.overlap(p, np.zeros(0, np.uint32))


@pytest.mark.parametrize("slot", [-1, 1 << 16])
def test_a_slot_out_of_range_is_refused(index: BlockIndex, slot: int) -> None:
    with pytest.raises(ValueError, match=rf"slot: within 0\.\.65535, not {slot}"):
        index.apply(Slot(slot), [])


def test_stats_count_blocks_sequences_ranks_and_bytes(index: BlockIndex) -> None:
    p = prompt(4)
    for slot in (A, B, C):
        index.apply(slot, [stored([1, 2, 3, 4], p)])
    stats = index.stats()
    assert stats.blocks == (12, 0, 0, 0)
    assert stats.sequences == (4, 0, 0, 0)
    assert stats.ranks == 3
    assert [index.apply(slot, [Cleared()]).cleared for slot in (A, B, C)] == [4, 4, 4]
    stats = index.stats()
    assert (stats.blocks, stats.sequences, stats.ranks, stats.bytes) == ((0,) * 4, (0,) * 4, 0, 0)
