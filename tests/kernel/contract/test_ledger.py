"""What every ledger does."""

from collections.abc import Callable

import numpy as np
import pytest

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot
from kvrouter.kernel.ledger.port import LeaseExists, Ledger, NativeLedger
from tests.oracles.ledger import NaiveLedger

A, B = Slot(0), Slot(3)
HERE = RouterId("router-1")


@pytest.fixture(params=[NaiveLedger, NativeLedger], ids=["naive", "native"])
def ledger(request: pytest.FixtureRequest) -> Ledger:
    maker: Callable[[int], Ledger] = request.param
    return maker(4)


def key(request_id: str, leg_number: int = 0, router_id: RouterId = HERE) -> LeaseKey:
    return LeaseKey(router_id, RequestId(request_id), leg_number)


def prompt(*tokens: int) -> Prompt:
    return Prompt(tokens, block_size=2)


def load(ledger: Ledger, slot: Slot) -> tuple[int, int]:
    columns = ledger.columns()
    return int(columns.prefill_tokens[slot]), int(columns.active_blocks[slot])


def not_active(ledger: Ledger, of: Prompt, exclude: LeaseId | None = None) -> list[int]:
    out = np.full(4, 99, np.uint32)
    ledger.not_active(of, out, exclude)
    return [int(blocks) for blocks in out]


def test_a_lease_loads_its_slot_until_it_is_closed(ledger: Ledger) -> None:
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1, 2, 2, 3), prefill_tokens=5)
    assert load(ledger, A) == (5, 3)
    assert ledger.first_token(lease)
    assert load(ledger, A) == (0, 3)
    assert ledger.output_block(lease)
    assert ledger.output_block(lease, 2)
    assert load(ledger, A) == (0, 6)
    assert load(ledger, B) == (0, 0)
    assert len(ledger) == 1
    assert ledger.close(lease)
    assert load(ledger, A) == (0, 0)
    assert len(ledger) == 0


def test_requests_wait_until_first_token_and_count_until_dropped(ledger: Ledger) -> None:
    def counts(slot: Slot) -> tuple[int, int]:
        columns = ledger.columns()
        return int(columns.requests[slot]), int(columns.waiting[slot])

    one = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
    other = ledger.book(key=key("s"), slot=A, prompt=prompt(1, 1), prefill_tokens=0, track_blocks=False)
    assert counts(A) == (2, 2)
    assert ledger.first_token(one)
    assert ledger.first_token(one)
    assert counts(A) == (2, 1)
    assert ledger.move(one, B, 0)
    assert ledger.move(other, B, 0)
    assert (counts(A), counts(B)) == ((0, 0), (2, 1))
    assert ledger.drop_slot(B) == 2
    assert counts(B) == (0, 0)


def test_calls_for_a_closed_lease_have_no_effect(ledger: Ledger) -> None:
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
    assert ledger.close(lease)
    assert not ledger.close(lease)
    assert not ledger.first_token(lease)
    assert not ledger.output_block(lease)
    assert not ledger.move(lease, B, 1)
    assert load(ledger, A) == load(ledger, B) == (0, 0)


def test_closing_before_the_first_token_frees_the_prefill(ledger: Ledger) -> None:
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
    ledger.close(lease)
    assert load(ledger, A) == (0, 0)


def test_shared_blocks_count_once_per_slot_and_tails_per_request(ledger: Ledger) -> None:
    first = ledger.book(key=key("a"), slot=A, prompt=prompt(1, 1, 2, 2, 3, 3, 4), prefill_tokens=0)
    second = ledger.book(key=key("b"), slot=A, prompt=prompt(1, 1, 2, 2, 9, 9, 4), prefill_tokens=0)
    third = ledger.book(key=key("c"), slot=A, prompt=prompt(1, 1), prefill_tokens=0)
    ledger.book(key=key("d"), slot=B, prompt=prompt(1, 1, 2, 2), prefill_tokens=0)
    assert load(ledger, A) == (0, 6)
    assert load(ledger, B) == (0, 2)
    ledger.close(first)
    assert load(ledger, A) == (0, 4)
    ledger.close(second)
    assert load(ledger, A) == (0, 1)
    ledger.close(third)
    assert load(ledger, A) == (0, 0)
    assert load(ledger, B) == (0, 2)


def test_not_active_counts_the_blocks_that_a_request_would_add(ledger: Ledger) -> None:
    lease = ledger.book(key=key("a"), slot=A, prompt=prompt(1, 1, 2, 2, 3, 3), prefill_tokens=0)
    ledger.book(key=key("b"), slot=B, prompt=prompt(1, 1, 5), prefill_tokens=0)
    assert not_active(ledger, prompt(1, 1, 2, 2, 7, 7, 8)) == [2, 4, 4, 3]
    assert not_active(ledger, prompt(1, 1, 2, 2, 3, 3)) == [0, 3, 3, 2]
    assert not_active(ledger, prompt(1, 1, 2, 2, 3, 3), exclude=lease) == [3, 3, 3, 2]
    assert not_active(ledger, prompt(1)) == [1, 1, 1, 1]
    assert not_active(ledger, prompt()) == [0, 0, 0, 0]


def test_an_excluded_lease_keeps_blocks_that_others_share(ledger: Ledger) -> None:
    lease = ledger.book(key=key("a"), slot=A, prompt=prompt(1, 1, 2, 2), prefill_tokens=0)
    ledger.book(key=key("b"), slot=A, prompt=prompt(1, 1), prefill_tokens=0)
    assert not_active(ledger, prompt(1, 1, 2, 2), exclude=lease) == [1, 2, 2, 2]


def test_a_lease_can_be_booked_without_tracking_blocks(ledger: Ledger) -> None:
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1, 2), prefill_tokens=3, track_blocks=False)
    assert ledger.output_block(lease)
    assert load(ledger, A) == (3, 0)
    assert not_active(ledger, prompt(1, 1, 2)) == [2, 2, 2, 2]
    ledger.move(lease, B, 1)
    assert (load(ledger, A), load(ledger, B)) == ((0, 0), (1, 0))
    ledger.close(lease)
    assert load(ledger, B) == (0, 0)


def test_a_prompt_made_from_block_hashes_shares_its_blocks(ledger: Ledger) -> None:
    whole = prompt(1, 1, 2, 2, 3, 3, 4)
    ledger.book(key=key("a"), slot=A, prompt=whole, prefill_tokens=0)
    there = Prompt.from_blocks(whole.block_hashes[:16], isl_tokens=7, block_size=2)
    lease = ledger.book(key=key("b", router_id=RouterId("other")), slot=A, prompt=there, prefill_tokens=3)
    assert load(ledger, A) == (3, 6)  # two blocks shared; one without a name and the tail are its own
    ledger.move(lease, B, 0)
    assert (load(ledger, A), load(ledger, B)) == ((0, 4), (0, 4))
    ledger.close(lease)
    assert load(ledger, B) == (0, 0)


def test_a_moved_lease_takes_its_blocks_along(ledger: Ledger) -> None:
    p = prompt(1, 1, 2, 2, 3)
    lease = ledger.book(key=key("r"), slot=A, prompt=p, prefill_tokens=5)
    ledger.output_block(lease)
    assert ledger.move(lease, B, 0)
    assert (load(ledger, A), load(ledger, B)) == ((0, 0), (0, 4))
    assert ledger.move(lease, B, 7)
    assert load(ledger, B) == (7, 4)
    assert ledger.find(key("r")) == lease
    ledger.close(lease)
    assert load(ledger, B) == (0, 0)


def test_a_key_has_one_open_lease(ledger: Ledger) -> None:
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
    with pytest.raises(LeaseExists) as caught:
        ledger.book(key=key("r"), slot=B, prompt=prompt(1, 1), prefill_tokens=2)
    assert caught.value.key == key("r")
    assert str(caught.value) == "leg 0 of request 'r' is booked by router 'router-1'"
    assert load(ledger, B) == (0, 0)
    ledger.book(key=key("r", leg_number=1), slot=B, prompt=prompt(1, 1), prefill_tokens=2)
    ledger.book(key=key("r", router_id=RouterId("other")), slot=B, prompt=prompt(1, 1), prefill_tokens=2)
    ledger.close(lease)
    assert ledger.find(key("r")) is None
    assert ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2) != lease


def test_dropping_a_slot_or_a_router_closes_its_leases(ledger: Ledger) -> None:
    other = RouterId("router-2")
    for name in "ab":
        ledger.book(key=key(name), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
        ledger.book(key=key(name, router_id=other), slot=B, prompt=prompt(1, 1, 2), prefill_tokens=2)
    assert ledger.drop_slot(A) == 2
    assert load(ledger, A) == (0, 0)
    assert load(ledger, B) == (4, 3)
    assert ledger.drop_slot(A) == 0
    assert ledger.drop_router(HERE) == 0
    assert ledger.drop_router(other) == 2
    assert load(ledger, B) == (0, 0)
    assert len(ledger) == 0


def test_columns_are_live_views_and_grow_by_ensure_slots(ledger: Ledger) -> None:
    before = ledger.columns()
    lease = ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=2)
    assert before.active_blocks[A] == 1
    with pytest.raises(ValueError, match="slot"):
        ledger.book(key=key("s"), slot=Slot(100), prompt=prompt(1, 1), prefill_tokens=2)
    with pytest.raises(ValueError, match="slot"):
        ledger.move(lease, Slot(100), 0)
    assert load(ledger, A) == (2, 1)
    assert not ledger.ensure_slots(4)
    assert ledger.ensure_slots(101)
    assert load(ledger, A) == (2, 1)
    assert ledger.move(lease, Slot(100), 0)
    assert load(ledger, Slot(100)) == (0, 1)
    assert load(ledger, A) == (0, 0)
    assert len(ledger.columns().prefill_tokens) >= 101


def test_negative_tokens_are_refused(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="prefill_tokens"):
        ledger.book(key=key("r"), slot=A, prompt=prompt(1, 1), prefill_tokens=-1)
    assert len(ledger) == 0


def test_the_not_active_array_may_be_shorter_than_the_columns(ledger: Ledger) -> None:
    ledger.book(key=key("r"), slot=B, prompt=prompt(1, 1), prefill_tokens=0)
    out = np.zeros(2, np.uint32)
    ledger.not_active(prompt(1, 1), out)
    assert out.tolist() == [1, 1]


def test_native_columns_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        NativeLedger().columns().active_blocks[0] = 1
