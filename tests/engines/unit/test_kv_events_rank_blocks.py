"""One rank's ledger: counts, parents, salts, groups, media, and what is not known."""

from kvrouter.core.events import Cleared, Medium, Removed, Stored, pack_hashes
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.core.ids import EngineHash
from kvrouter.engines.kv_events.engine_events import (
    CacheGroup,
    EngineCleared,
    EngineGroup,
    EngineMoved,
    EngineRemoved,
    EngineSkipped,
    EngineTraits,
    Skipped,
)
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from tests.testing.recorded_frames import stored

FULL = CacheGroup(0, 2)
WINDOW = CacheGroup(1, 0)


def test_store_gives_the_block_hashes_of_its_tokens() -> None:
    ledger = _ledger()
    (event,) = ledger.take((stored((11, 12), tokens=range(8)),))
    assert event == Stored(None, pack_hashes((11, 12)), Prompt(range(8), block_size=4).block_hashes)


def test_block_stored_twice_needs_two_removals() -> None:
    ledger = _ledger()
    ledger.take((stored((11,)), stored((11,))))
    assert ledger.take((_removed(11),)) == (Removed(pack_hashes((11,))),)
    assert ledger.held() == 1
    assert ledger.take((_removed(11),)) == (Removed(pack_hashes((11,))),)
    assert ledger.held() == 0
    assert ledger.take((_removed(11),)) == ()
    assert ledger.skipped == {Skipped.UNKNOWN_REMOVED: 1}


def test_a_clear_forgets_counts_and_makes_a_partial_rank_whole() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4), is_partial=True)
    ledger.take((stored((11,)), stored((11,))))
    assert ledger.take((EngineCleared(),)) == (Cleared(),)
    assert (ledger.held(), ledger.is_partial) == (0, False)
    ledger.take((stored((11,)), _removed(11)))
    assert ledger.held() == 0


def test_child_of_a_block_cleared_by_a_late_clear_is_skipped() -> None:
    ledger = _ledger()
    ledger.take((stored((11, 12)), EngineCleared()))
    assert ledger.take((stored((13,), parent=12), _removed(11))) == ()
    assert ledger.skipped == {Skipped.ORPHAN: 1, Skipped.UNKNOWN_REMOVED: 1}
    assert ledger.is_partial


def test_blocks_with_known_parents_count_after_attaching_late() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4), is_partial=True)
    events = ledger.take((stored((21,), parent=20), stored((31,)), stored((32,), parent=31)))
    assert [event.n_blocks for event in events if isinstance(event, Stored)] == [1, 1]
    assert ledger.skipped == {Skipped.ORPHAN: 1}
    assert (ledger.held(), ledger.is_partial) == (2, True)


def test_salt_of_a_block_applies_to_its_children() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), tokens=range(4), cache_salt="a"),))
    (child,) = ledger.take((stored((12,), parent=11, tokens=range(4, 8)),))
    assert isinstance(child, Stored)
    whole = Prompt(range(8), block_size=4, seed=hash_seed(cache_namespace="a"))
    assert child.block_hashes == whole.block_hashes[8:]


def test_adapter_number_is_mapped_to_its_name_or_skipped() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4, lora_names={1: "ada"}))
    by_name, by_number = ledger.take(
        (stored((11,), lora_name="ada"), stored((12,), tokens=[11] * 4, lora_id=1))
    )
    assert isinstance(by_name, Stored)
    assert isinstance(by_number, Stored)
    assert by_name.block_hashes == by_number.block_hashes
    assert ledger.take((stored((13,), lora_id=2),)) == ()
    assert ledger.skipped == {Skipped.UNNAMED_LORA: 1}


def test_multimodal_hashes_enter_the_block_hashes() -> None:
    ledger = _ledger()
    (event,) = ledger.take((stored((11, 12), tokens=[9] * 8, mm_hashes=((5,), (6,))),))
    assert isinstance(event, Stored)
    same = Prompt([9] * 8, block_size=4, mm_hashes=[[5], [6]])
    assert event.block_hashes == same.block_hashes
    assert ledger.take((stored((13,), mm_hashes=((5,), (6,))),)) == ()
    assert ledger.skipped == {Skipped.TOKENS_MISMATCH: 1}


def test_events_of_a_window_group_are_skipped_beside_full_attention() -> None:
    ledger = _ledger()
    first = ledger.take((stored((11,), group=FULL), stored((11,), group=WINDOW)))
    assert len(first) == 1
    assert ledger.take((_removed(11, group_key=1),)) == ()
    assert ledger.held() == 1
    ledger.take((_removed(11, group_key=0),))
    assert ledger.held() == 0
    assert ledger.skipped == {Skipped.OTHER_GROUP: 2}


def test_only_the_first_of_two_equal_groups_counts() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), group=CacheGroup(3, 2)), stored((12,), group=CacheGroup(4, 2))))
    assert (ledger.held(), ledger.skipped) == (1, {Skipped.OTHER_GROUP: 1})


def test_window_group_counts_until_full_attention_is_seen() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), group=WINDOW),))
    assert ledger.held() == 1
    taken = ledger.take((stored((11,), group=FULL),))
    assert [type(event) for event in taken] == [Cleared, Stored]
    assert (ledger.held(), ledger.is_partial) == (1, False)


def test_announced_larger_group_counts_before_it_holds_blocks() -> None:
    ledger = _ledger()
    events = (
        EngineGroup(CacheGroup(64, 64)),
        EngineGroup(CacheGroup(512, 512)),
        stored((11,), group=CacheGroup(64, 64)),
    )
    assert ledger.take(events) == ()
    assert ledger.skipped == {Skipped.OTHER_GROUP: 1}


def test_cpu_copy_of_a_known_block_needs_no_tokens() -> None:
    ledger = _ledger()
    ledger.take((stored((11, 12), cache_salt="a"),))
    copies = ledger.take((stored((11, 12), tokens=(), block_size=0, medium=Medium.CPU),))
    assert [type(event) for event in copies] == [Stored, Stored]
    assert (ledger.held(), ledger.held(Medium.CPU)) == (2, 2)
    ledger.take((_removed(11), _removed(12)))
    (child,) = ledger.take((stored((13,), parent=12),))
    assert isinstance(child, Stored)
    assert child.block_hashes == _hash(13, "a")
    assert ledger.take((stored((99,), tokens=(), block_size=0, medium=Medium.CPU),)) == ()
    assert ledger.skipped == {Skipped.NO_TOKENS: 1}


def test_copy_without_a_salt_keeps_the_salt_of_its_block() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), cache_salt="a"),))
    (copy,) = ledger.take((stored((11,), medium=Medium.CPU),))
    assert isinstance(copy, Stored)
    assert copy.block_hashes == _hash(11, "a")


def test_block_moves_between_media_and_is_found_by_later_events() -> None:
    ledger = _ledger()
    ledger.take((stored((11,)), stored((12,), parent=11)))
    moved = ledger.take((EngineMoved(EngineHash(11), Medium.GPU, Medium.CPU),))
    assert [type(event) for event in moved] == [Stored, Removed]
    assert (ledger.held(), ledger.held(Medium.CPU)) == (1, 1)
    ledger.take((EngineMoved(EngineHash(12), Medium.GPU, Medium.CPU),))
    assert ledger.held(Medium.CPU) == 2
    ledger.take((EngineRemoved((EngineHash(12),), None),))
    assert ledger.held(Medium.CPU) == 1
    assert ledger.take((EngineMoved(EngineHash(12), Medium.GPU, Medium.CPU),)) == ()


def test_blocks_of_another_size_are_skipped_and_counted() -> None:
    ledger = _ledger()
    assert ledger.take((stored((11,), block_size=8), stored((12,), tokens=range(5)))) == ()
    assert ledger.skipped == {Skipped.OTHER_BLOCK_SIZE: 1, Skipped.TOKENS_MISMATCH: 1}
    assert not ledger.is_partial


def test_full_rank_skips_further_blocks_and_is_partial() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4, blocks_max=2))
    (event,) = ledger.take((stored((11, 12, 13)),))
    assert isinstance(event, Stored)
    assert event.n_blocks == 2
    assert ledger.take((stored((14,)),)) == ()
    assert ledger.skipped == {Skipped.OVER_LIMIT: 2}
    assert ledger.is_partial


def test_lost_events_clear_the_rank_and_make_it_partial() -> None:
    ledger = _ledger()
    ledger.take((stored((11,)),))
    assert ledger.lose() == (Cleared(),)
    assert (ledger.held(), ledger.is_partial) == (0, True)


def test_skipped_events_are_counted_by_reason() -> None:
    ledger = _ledger()
    assert ledger.take((EngineSkipped(Skipped.UNKNOWN_EVENT), EngineSkipped(Skipped.NOT_LOCAL, 3))) == ()
    assert ledger.skipped == {Skipped.UNKNOWN_EVENT: 1, Skipped.NOT_LOCAL: 3}


def _ledger() -> RankBlocks:
    return RankBlocks(EngineTraits(block_size=4))


def _removed(name: int, group_key: int | None = None) -> EngineRemoved:
    return EngineRemoved((EngineHash(name),), Medium.GPU, group_key)


def _hash(name: int, salt: str) -> bytes:
    return Prompt([name] * 4, block_size=4, seed=hash_seed(cache_namespace=salt)).block_hashes
