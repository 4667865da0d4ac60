"""The lowest cost among allowed slots is picked; of equal ones the hashes of request and ranks choose."""

from math import inf, isnan, nan
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import pick_lowest
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import RequestId

MASK64 = 2**64 - 1
COSTS = st.sampled_from((-inf, -1.5, -0.0, 0.0, 1.0, 1.0 + 2**-52, 2.0, 1e308, inf)) | st.floats()
SLOTS = st.lists(
    st.tuples(COSTS, st.sampled_from((True, True, False)), st.integers(0, 3) | st.integers(0, MASK64)),
    max_size=40,
)


def spread(rank_hash: int, request_id: str) -> int:
    bits = (rank_hash ^ mix64(crc32(request_id.encode()))) * 0xBF58476D1CE4E5B9 & MASK64
    bits = (bits ^ bits >> 32) * 0x94D049BB133111EB & MASK64
    return bits ^ bits >> 29


def picked(slots: list[tuple[float, bool, int]], request_id: str, unseen: int, own_cost: float) -> int | None:
    """Return the slot that the rule picks; None when there is none."""
    costs = {slot: cost for slot, (cost, is_allowed, _) in enumerate(slots) if is_allowed}
    for _ in range(unseen):
        if costs and not any(map(isnan, costs.values())):
            costs[min(costs, key=costs.__getitem__)] += own_cost
    if not costs or any(map(isnan, costs.values())):
        return None
    best = min(costs.values())
    equal = [slot for slot, cost in costs.items() if cost == best]
    return min(equal, key=lambda slot: spread(slots[slot][2], request_id))


@given(SLOTS, st.text("aé漢0-", max_size=12), st.integers(0, 4), st.sampled_from((0.0, 0.5, 1.0, inf, nan)))
def test_the_native_pick_is_the_one_that_the_rule_states(
    slots: list[tuple[float, bool, int]], name: str, unseen: int, own_cost: float
) -> None:
    cost = np.array([cost for cost, _, _ in slots], np.float64)
    allowed = np.array([is_allowed for _, is_allowed, _ in slots], np.bool_)
    rank_hash = np.array([rank_hash for _, _, rank_hash in slots], np.uint64)
    before = cost.copy()
    expected = picked(slots, name, unseen, own_cost)
    masks = [allowed, None] if allowed.all() else [allowed]
    for mask in masks:
        if expected is None:
            with pytest.raises(ValueError, match=r"allowed: no slot|cost: of slot \d+ is not a number"):
                pick_lowest(cost, mask, rank_hash, RequestId(name), unseen, own_cost)
        else:
            assert pick_lowest(cost, mask, rank_hash, RequestId(name), unseen, own_cost) == expected
    np.testing.assert_array_equal(cost, before)


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    cost, hashes, name = np.zeros(3), np.zeros(3, np.uint64), RequestId("r")
    with pytest.raises(ValueError, match="allowed: at least 3 entries"):
        pick_lowest(cost, np.ones(2, np.bool_), hashes, name, 0, 0.0)
    with pytest.raises(TypeError, match="allowed: not a column of its type"):
        pick_lowest(cost, np.ones(3), hashes, name, 0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank_hash: at least 3 entries"):
        pick_lowest(cost, None, hashes[:2], name, 0, 0.0)
    with pytest.raises(ValueError, match="cost: at least 0 entries, C-contiguous"):
        pick_lowest(np.zeros(6)[::2], None, hashes, name, 0, 0.0)
