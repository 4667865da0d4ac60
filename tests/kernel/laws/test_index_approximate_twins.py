"""The native approximate index equals its naive twin after any decisions."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.kernel.index import NativeApproximateIndex
from tests.oracles.index import NaiveApproximateIndex

SLOTS = st.sampled_from([Slot(n) for n in (0, 1, 2, 70)])
N_SLOTS = 71
PROMPTS = [
    Prompt([family] * shared + list(range(own)), block_size=1)
    for family in (1, 2)
    for shared in (0, 3, 5)
    for own in (0, 1, 4)
]


class Twins(RuleBasedStateMachine):
    """Both indexes, under one clock that never goes back and often stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.native = NativeApproximateIndex(ttl_s=8.0, max_blocks=24, prune_target_ratio=0.6)
        self.naive = NaiveApproximateIndex(ttl_s=8.0, max_blocks=24, prune_target_ratio=0.6)
        self.now_s = 0.0

    @rule(slot=SLOTS, prompt=st.sampled_from(PROMPTS), later_s=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def touch(self, slot: Slot, prompt: Prompt, later_s: float) -> None:
        self.now_s += later_s
        self.native.touch(slot, prompt, self.now_s)
        self.naive.touch(slot, prompt, self.now_s)

    @rule(later_s=st.sampled_from([0.0, 1.0, 4.0]))
    def expire(self, later_s: float) -> None:
        self.now_s += later_s
        assert self.native.expire(self.now_s) == self.naive.expire(self.now_s)

    @rule(slot=SLOTS)
    def drop(self, slot: Slot) -> None:
        self.native.drop(slot)
        self.naive.drop(slot)

    @invariant()
    def overlaps_are_equal(self) -> None:
        ours, twin = np.full(N_SLOTS, 77, np.uint32), np.full(N_SLOTS, 99, np.uint32)
        for ahead_s in (0.0, 7.0, 8.0):
            for prompt in PROMPTS:
                self.native.overlap(prompt, ours, self.now_s + ahead_s)
                self.naive.overlap(prompt, twin, self.now_s + ahead_s)
                assert ours.tolist() == twin.tolist()

    @invariant()
    def sizes_are_equal(self) -> None:
        assert self.native.stats().blocks == self.naive.stats().blocks


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=50, stateful_step_count=40)
