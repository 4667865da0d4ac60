"""Ranks that publish no KV events: their caches are predicted, and no other slot's column is touched."""

import numpy as np

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.kernel.index import NativeApproximateIndex
from kvrouter.kernel.placement.cache_view import UnreportedRanks

FAR = Slot(40)


def test_predictions_fill_the_slots_without_events_alone() -> None:
    index = NativeApproximateIndex()
    ranks, prompt = UnreportedRanks(index), Prompt(range(6), block_size=2)
    index.touch(Slot(1), prompt, 0.0)

    def filled(prompt: Prompt) -> list[int]:
        out = np.full(FAR + 2, 0, np.uint32)
        out[2] = 2
        ranks.fill(out, prompt, now_s=1.0)
        return [int(out[slot]) for slot in (0, 1, 2, FAR, FAR + 1)]

    assert filled(prompt) == [0, 0, 2, 0, 0]
    ranks.decided(FAR, prompt, now_s=0.0)
    ranks.decided(Slot(0), prompt, now_s=0.0)
    assert filled(prompt) == [3, 0, 2, 3, 0]
    ranks.freed(FAR)
    ranks.freed(FAR)
    assert filled(prompt) == [3, 0, 2, 0, 0]
    ranks.freed(Slot(0))
    assert filled(prompt) == [0, 0, 2, 0, 0]


def test_a_slot_of_another_rank_behind_all_of_these_is_no_error() -> None:
    index = NativeApproximateIndex()
    ranks, prompt = UnreportedRanks(index), Prompt(range(6), block_size=2)
    ranks.decided(Slot(3), prompt, now_s=0.0)
    index.touch(FAR, prompt, 0.0)  # an image's prompt was decided for it
    out = np.zeros(FAR + 1, np.uint32)
    ranks.fill(out, prompt, now_s=1.0)
    assert (out[3], out[FAR]) == (3, 0)
