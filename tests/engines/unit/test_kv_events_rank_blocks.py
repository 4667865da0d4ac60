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


def test_a_store_names_the_blocks_by_their_tokens() -> None:
    ledger = _ledger()
    (event,) = ledger.take((stored((11, 12), tokens=range(8)),))
    assert event == Stored(None, pack_hashes((11, 12)), Prompt(range(8), block_size=4).block_hashes)


def test_two_stores_need_two_removals() -> None:
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


def test_a_clear_that_comes_after_the_stores_which_followed_it_costs_hits_alone() -> None:
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


def test_a_salt_holds_for_all_that_follows() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), tokens=range(4), cache_salt="a"),))
    (child,) = ledger.take((stored((12,), parent=11, tokens=range(4, 8)),))
    assert isinstance(child, Stored)
    whole = Prompt(range(8), block_size=4, seed=hash_seed(cache_namespace="a"))
    assert child.block_hashes == whole.block_hashes[8:]


def test_an_adapter_goes_by_its_name_and_a_number_has_to_stand_for_one() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4, lora_names={1: "ada"}))
    by_name, by_number = ledger.take(
        (stored((11,), lora_name="ada"), stored((12,), tokens=[11] * 4, lora_id=1))
    )
    assert isinstance(by_name, Stored)
    assert isinstance(by_number, Stored)
    assert by_name.block_hashes == by_number.block_hashes
    assert ledger.take((stored((13,), lora_id=2),)) == ()
    assert ledger.skipped == {Skipped.UNNAMED_LORA: 1}


def test_multimodal_objects_tell_equal_tokens_apart() -> None:
    ledger = _ledger()
    (event,) = ledger.take((stored((11, 12), tokens=[9] * 8, mm_hashes=((5,), (6,))),))
    assert isinstance(event, Stored)
    same = Prompt([9] * 8, block_size=4, mm_hashes=[[5], [6]])
    assert event.block_hashes == same.block_hashes
    assert ledger.take((stored((13,), mm_hashes=((5,), (6,))),)) == ()
    assert ledger.skipped == {Skipped.TOKENS_MISMATCH: 1}


def test_full_attention_decides_and_a_window_is_let_go() -> None:
    ledger = _ledger()
    first = ledger.take((stored((11,), group=FULL), stored((11,), group=WINDOW)))
    assert len(first) == 1
    assert ledger.take((_removed(11, group_key=1),)) == ()
    assert ledger.held() == 1
    ledger.take((_removed(11, group_key=0),))
    assert ledger.held() == 0
    assert ledger.skipped == {Skipped.OTHER_GROUP: 2}


def test_the_first_of_two_equal_groups_decides() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), group=CacheGroup(3, 2)), stored((12,), group=CacheGroup(4, 2))))
    assert (ledger.held(), ledger.skipped) == (1, {Skipped.OTHER_GROUP: 1})


def test_a_window_counts_until_full_attention_is_seen_and_takes_over() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), group=WINDOW),))
    assert ledger.held() == 1
    taken = ledger.take((stored((11,), group=FULL),))
    assert [type(event) for event in taken] == [Cleared, Stored]
    assert (ledger.held(), ledger.is_partial) == (1, False)


def test_a_group_that_was_announced_decides_before_it_holds_anything() -> None:
    ledger = _ledger()
    events = (
        EngineGroup(CacheGroup(64, 64)),
        EngineGroup(CacheGroup(512, 512)),
        stored((11,), group=CacheGroup(64, 64)),
    )
    assert ledger.take(events) == ()
    assert ledger.skipped == {Skipped.OTHER_GROUP: 1}


def test_a_copy_below_the_gpu_needs_no_tokens() -> None:
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


def test_a_copy_whose_salt_is_left_out_keeps_the_one_that_it_was_stored_with() -> None:
    ledger = _ledger()
    ledger.take((stored((11,), cache_salt="a"),))
    (copy,) = ledger.take((stored((11,), medium=Medium.CPU),))
    assert isinstance(copy, Stored)
    assert copy.block_hashes == _hash(11, "a")


def test_a_block_moves_between_media_and_is_found_by_what_follows() -> None:
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


def test_blocks_that_are_no_runs_of_our_size_are_let_go() -> None:
    ledger = _ledger()
    assert ledger.take((stored((11,), block_size=8), stored((12,), tokens=range(5)))) == ()
    assert ledger.skipped == {Skipped.OTHER_BLOCK_SIZE: 1, Skipped.TOKENS_MISMATCH: 1}
    assert not ledger.is_partial


def test_a_rank_that_is_full_holds_no_more_and_says_so() -> None:
    ledger = RankBlocks(EngineTraits(block_size=4, blocks_max=2))
    (event,) = ledger.take((stored((11, 12, 13)),))
    assert isinstance(event, Stored)
    assert event.n_blocks == 2
    assert ledger.take((stored((14,)),)) == ()
    assert ledger.skipped == {Skipped.OVER_LIMIT: 2}
    assert ledger.is_partial


def test_lost_events_empty_the_rank() -> None:
    ledger = _ledger()
    ledger.take((stored((11,)),))
    assert ledger.lose() == (Cleared(),)
    assert (ledger.held(), ledger.is_partial) == (0, True)


def test_what_is_skipped_is_counted() -> None:
    ledger = _ledger()
    assert ledger.take((EngineSkipped(Skipped.UNKNOWN_EVENT), EngineSkipped(Skipped.NOT_LOCAL, 3))) == ()
    assert ledger.skipped == {Skipped.UNKNOWN_EVENT: 1, Skipped.NOT_LOCAL: 3}


def _ledger() -> RankBlocks:
    return RankBlocks(EngineTraits(block_size=4))


def _removed(name: int, group_key: int | None = None) -> EngineRemoved:
    return EngineRemoved((EngineHash(name),), Medium.GPU, group_key)


def _hash(name: int, salt: str) -> bytes:
    return Prompt([name] * 4, block_size=4, seed=hash_seed(cache_namespace=salt)).block_hashes
