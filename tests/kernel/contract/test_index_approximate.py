"""What every approximate index does."""

from collections.abc import Callable

import numpy as np
import pytest

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.kernel.index import ApproximateIndex, NativeApproximateIndex
from tests.oracles.index import NaiveApproximateIndex

A, B = Slot(0), Slot(5)


@pytest.fixture(params=[NaiveApproximateIndex, NativeApproximateIndex], ids=["naive", "native"])
def make(request: pytest.FixtureRequest) -> Callable[..., ApproximateIndex]:
    maker: Callable[..., ApproximateIndex] = request.param
    return maker


def prompt(n_blocks: int, *, first: int = 0) -> Prompt:
    return Prompt(list(range(first, first + n_blocks)), block_size=1)


def overlap(index: ApproximateIndex, of: Prompt, now_s: float) -> dict[int, int]:
    out = np.full(8, 99, np.uint32)
    index.overlap(of, out, now_s)
    return {int(slot): int(out[slot]) for slot in np.flatnonzero(out)}


def test_blocks_are_held_until_their_ttl(make: Callable[..., ApproximateIndex]) -> None:
    index = make(ttl_s=10.0)
    index.touch(A, prompt(3), 100.0)
    index.touch(B, prompt(2), 105.0)
    assert overlap(index, prompt(4), 109.9) == {A: 3, B: 2}
    assert overlap(index, prompt(4), 110.0) == {B: 2}
    assert overlap(index, prompt(4), 100.0) == {A: 3, B: 2}, "a reading forgets nothing"
    assert index.expire(110.0) == 3
    assert overlap(index, prompt(4), 100.0) == {B: 2}
    assert index.stats().blocks == 2


def test_a_touch_renews_the_ttl_of_its_blocks(make: Callable[..., ApproximateIndex]) -> None:
    index = make(ttl_s=10.0)
    index.touch(A, prompt(4), 0.0)
    index.touch(A, prompt(2), 5.0)
    assert overlap(index, prompt(4), 9.0) == {A: 4}
    assert overlap(index, prompt(4), 12.0) == {A: 2}
    assert index.expire(12.0) == 2
    assert index.expire(15.0) == 2
    assert index.stats().blocks == 0


def test_pruning_drops_oldest_then_deepest_blocks(make: Callable[..., ApproximateIndex]) -> None:
    index = make(max_blocks=10, prune_target_ratio=0.8)
    index.touch(A, prompt(4), 0.0)
    index.touch(B, prompt(3), 0.0)
    index.touch(A, prompt(3, first=50), 1.0)
    assert index.stats().blocks == 10
    index.touch(A, prompt(1, first=90), 1.0)
    assert index.stats().blocks == 8
    assert overlap(index, prompt(4), 1.0) == {A: 2, B: 2}
    assert overlap(index, prompt(3, first=50), 1.0) == {A: 3}


def test_a_prompt_above_the_limit_keeps_its_leading_blocks(make: Callable[..., ApproximateIndex]) -> None:
    index = make(max_blocks=10, prune_target_ratio=0.5)
    index.touch(A, prompt(20), 0.0)
    assert overlap(index, prompt(20), 0.0) == {A: 5}


def test_a_dropped_slot_loses_all_its_blocks(make: Callable[..., ApproximateIndex]) -> None:
    index = make(ttl_s=10.0)
    index.touch(A, prompt(2), 0.0)
    index.touch(B, prompt(4), 0.0)
    index.drop(B)
    assert index.stats().blocks == 2
    index.drop(B)
    assert overlap(index, prompt(4), 0.0) == {A: 2}
    index.touch(B, prompt(1), 5.0)
    assert index.expire(10.0) == 2
    assert overlap(index, prompt(4), 10.0) == {B: 1}


def test_blocks_of_a_dropped_slot_count_for_none_and_need_no_room(
    make: Callable[..., ApproximateIndex],
) -> None:
    index, long = make(), prompt(10_000)
    index.touch(A, prompt(3), 0.0)
    index.touch(B, long, 0.0)
    index.drop(B)
    out = np.full(A + 1, 99, np.uint32)
    index.overlap(long, out, 0.0)
    assert out.tolist() == [3]
    index.touch(B, prompt(2), 0.0)
    assert overlap(index, long, 0.0) == {A: 3, B: 2}, "the slot's next rank has its own blocks alone"


def test_a_prompt_without_full_blocks_changes_nothing(make: Callable[..., ApproximateIndex]) -> None:
    index = make()
    index.touch(A, Prompt([1], block_size=4), 0.0)
    assert index.stats().blocks == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"max_blocks": 0}, "max_blocks"),
        ({"prune_target_ratio": 1.5}, "prune_target_ratio"),
        ({"prune_target_ratio": float("nan")}, "prune_target_ratio"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], named: str) -> None:
    make: Callable[..., ApproximateIndex] = NativeApproximateIndex
    with pytest.raises(ValueError, match=named):
        make(**settings)
