"""The native ledger equals its naive twin after any course of requests, and drains to exactly zero."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot
from kvrouter.kernel.ledger.port import LeaseExists, NativeLedger
from tests.oracles.ledger import NaiveLedger

N_SLOTS = 6
SLOTS = st.integers(0, N_SLOTS - 1).map(Slot)
TOKENS = st.lists(st.integers(0, 1), max_size=11)


def heard_of(tokens: list[int], n_named: int) -> Prompt:
    """The prompt as another router tells of it, the first blocks by name."""
    named = Prompt(tokens, block_size=2).block_hashes[: 8 * n_named]
    return Prompt.from_blocks(named, isl_tokens=len(tokens), block_size=2)


PROMPTS = st.one_of(
    TOKENS.map(lambda tokens: Prompt(tokens, block_size=2)), st.builds(heard_of, TOKENS, st.integers(0, 5))
)
KEYS = st.builds(
    LeaseKey,
    st.sampled_from([RouterId("here"), RouterId("there")]),
    st.integers(0, 7).map(lambda n: RequestId(f"request-{n}")),
    st.integers(0, 1),
)


class Twins(RuleBasedStateMachine):
    """Both ledgers, given the same. A lease is the pair of its numbers in each."""

    leases: Bundle[tuple[LeaseId, LeaseId]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.native, self.naive = NativeLedger(2), NaiveLedger(2)
        self.native.ensure_slots(N_SLOTS)
        self.naive.ensure_slots(N_SLOTS)
        self.asked: list[Prompt] = [Prompt([0, 0, 1, 1, 0, 0, 1], block_size=2)]

    @rule(target=leases, key=KEYS, slot=SLOTS, prompt=PROMPTS, tokens=st.integers(0, 9), track=st.booleans())
    def book(
        self, key: LeaseKey, slot: Slot, prompt: Prompt, tokens: int, track: bool
    ) -> tuple[LeaseId, LeaseId]:
        numbers = []
        for ledger in (self.native, self.naive):
            number = ledger.find(key)
            if number is None:
                number = ledger.book(
                    key=key, slot=slot, prompt=prompt, prefill_tokens=tokens, track_blocks=track
                )
                assert ledger.find(key) == number
            else:
                with pytest.raises(LeaseExists):
                    ledger.book(key=key, slot=slot, prompt=prompt, prefill_tokens=tokens)
            numbers.append(number)
        self.asked = [*self.asked[-3:], prompt]
        return numbers[0], numbers[1]

    @rule(lease=leases)
    def first_token(self, lease: tuple[LeaseId, LeaseId]) -> None:
        assert self.native.first_token(lease[0]) == self.naive.first_token(lease[1])

    @rule(lease=leases, n=st.integers(0, 3))
    def output_block(self, lease: tuple[LeaseId, LeaseId], n: int) -> None:
        assert self.native.output_block(lease[0], n) == self.naive.output_block(lease[1], n)

    @rule(lease=leases, slot=SLOTS, tokens=st.integers(0, 9))
    def move(self, lease: tuple[LeaseId, LeaseId], slot: Slot, tokens: int) -> None:
        assert self.native.move(lease[0], slot, tokens) == self.naive.move(lease[1], slot, tokens)

    @rule(lease=leases)
    def close(self, lease: tuple[LeaseId, LeaseId]) -> None:
        assert self.native.close(lease[0]) == self.naive.close(lease[1])

    @rule(lease=leases)
    def leave_out(self, lease: tuple[LeaseId, LeaseId]) -> None:
        self.compare_not_active(lease)

    @rule(slot=SLOTS)
    def drop_slot(self, slot: Slot) -> None:
        assert self.native.drop_slot(slot) == self.naive.drop_slot(slot)

    @rule(router=st.sampled_from([RouterId("here"), RouterId("there")]))
    def drop_router(self, router: RouterId) -> None:
        assert self.native.drop_router(router) == self.naive.drop_router(router)

    def compare_not_active(self, exclude: tuple[LeaseId, LeaseId] | None) -> None:
        ours, twin = np.full(N_SLOTS, 77, np.uint32), np.full(N_SLOTS, 99, np.uint32)
        for prompt in self.asked:
            self.native.not_active(prompt, ours, exclude and exclude[0])
            self.naive.not_active(prompt, twin, exclude and exclude[1])
            assert ours.tolist() == twin.tolist()

    @invariant()
    def loads_are_equal(self) -> None:
        ours, twin = self.native.columns(), self.naive.columns()
        for column, its_twin in zip(ours, twin, strict=True):
            assert column[:N_SLOTS].tolist() == its_twin.tolist()
        assert len(self.native) == len(self.naive)
        self.compare_not_active(None)

    def teardown(self) -> None:
        for slot in range(N_SLOTS):
            self.native.drop_slot(Slot(slot))
        columns = self.native.columns()
        assert not any(column.any() for column in columns)
        assert (len(self.native), self.native.n_runs) == (0, 0)


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=80, stateful_step_count=40)
