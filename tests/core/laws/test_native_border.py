"""Whatever number Python hands over: an answer or an error that names the argument, never a wrong sum or the
end of the process.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter._native import ApproximateIndex, BlockIndex, Ledger, Prompt, block_hashes
from kvrouter.core.events import Medium
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot

EDGES = [0, 1, 2, 63, 64, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63]
EDGES += [2**64 - 1, 2**64, 10**13, 10**30, 10**5000]
WHOLE = st.sampled_from([*EDGES, *(-edge for edge in EDGES)]) | st.integers()
REFUSALS = (ValueError, OverflowError)
SLOTS_MAX = 65_536

T = TypeVar("T")


def key(leg: int, name: str = "a") -> LeaseKey:
    return LeaseKey(RouterId("r"), RequestId(name), leg)


@given(WHOLE)
@example(10**13)
def test_ledger_refuses_slot_counts_outside_its_limit_by_name(n_slots: int) -> None:
    if 0 <= n_slots <= SLOTS_MAX:
        assert Ledger(n_slots).n_slots == n_slots
        assert Ledger(1).ensure_slots(n_slots) is (n_slots > 1)
        return
    for refused in (Ledger, Ledger(1).ensure_slots):
        with pytest.raises(REFUSALS, match="n_slots"):
            refused(n_slots)


def tried(call: Callable[[], T], *names: str) -> tuple[T] | None:
    """What the call returns; None when it is refused, by the name of one of these arguments."""
    try:
        return (call(),)
    except REFUSALS as refused:
        reported = str(refused)
    assert any(name in reported for name in names), reported
    return None


@given(st.lists(st.tuples(WHOLE, WHOLE, WHOLE, WHOLE), max_size=8))
@example([(0, 2**32 - 1, 2**32 - 1, 1)] * 8)
def test_ledger_columns_equal_sums_of_accepted_calls(calls: list[tuple[int, int, int, int]]) -> None:
    ledger = Ledger(4)
    prompt = Prompt.from_blocks(b"", isl_tokens=2**32 - 1, block_size=1)
    tokens, blocks = [0] * 4, [0] * 4
    open_leases: list[LeaseId] = []
    for number, (slot, prefill_tokens, n, to) in enumerate(calls):
        book = partial(
            ledger.book, key=key(number), slot=Slot(slot), prompt=prompt, prefill_tokens=prefill_tokens
        )
        booked = tried(book, "slot: ", "prefill_tokens: ")
        if booked is None:
            continue
        (lease,) = booked
        open_leases.append(lease)
        held = prompt.total_blocks
        if tried(partial(ledger.output_block, lease, n), "n: "):
            held += n
        where = slot
        if tried(partial(ledger.move, lease, Slot(to), prefill_tokens), "slot: "):
            where = to
        tokens[where] += prefill_tokens
        blocks[where] += held
        assert list(memoryview(ledger.prefill_tokens)) == tokens
        assert list(memoryview(ledger.active_blocks)) == blocks
    for lease in open_leases:
        assert ledger.close(lease)
    assert list(memoryview(ledger.prefill_tokens)) == list(memoryview(ledger.active_blocks)) == [0] * 4


@given(WHOLE, WHOLE, WHOLE)
def test_ledger_refuses_out_of_range_leases_and_keys_by_name(lease: int, leg: int, exclude: int) -> None:
    ledger = Ledger(1)
    out = array("I", [0])
    prompt = Prompt([1], block_size=1)
    assert tried(lambda: ledger.close(LeaseId(lease)), "lease: ") in {None, (False,)}
    assert tried(lambda: ledger.first_token(LeaseId(lease)), "lease: ") in {None, (False,)}
    assert tried(lambda: ledger.find(key(leg)), "key: ") in {None, (None,)}
    assert tried(lambda: ledger.not_active(prompt, out, LeaseId(exclude)), "exclude: ") in {None, (None,)}


@given(WHOLE, WHOLE, WHOLE)
def test_prompt_refuses_out_of_range_numbers_by_name(isl_tokens: int, block_size: int, seed: int) -> None:
    made = tried(
        lambda: Prompt.from_blocks(b"\0" * 8, isl_tokens=isl_tokens, block_size=block_size),
        "isl_tokens: ",
        "block_size: ",
    )
    if made:
        assert made[0].total_blocks == -(-isl_tokens // block_size)
    tried(lambda: Prompt([1, 2, 3], block_size=block_size, seed=seed), "block_size: ", "seed: ")
    tried(lambda: block_hashes([1, 2, 3], block_size=block_size, seed=seed), "block_size: ", "seed: ")
    tried(lambda: Prompt([isl_tokens], block_size=1), "tokens[0]: ")
    tried(lambda: Prompt([1], block_size=1, mm_hashes=[[seed]]), "mm_hashes: ")


@given(WHOLE, WHOLE, WHOLE)
def test_indexes_refuse_out_of_range_numbers_by_name(slot: int, number: int, medium: int) -> None:
    prompt = Prompt([1, 2], block_size=1)
    index = BlockIndex()
    tried(lambda: BlockIndex(blocks_per_rank_max=number), "blocks_per_rank_max: ")
    tried(lambda: ApproximateIndex(max_blocks=number), "max_blocks: ")
    tried(lambda: index.apply(Slot(slot), []), "slot: ")
    tried(lambda: index.drop_some(Slot(slot)), "slot: ")
    tried(lambda: index.dump_some(Slot(0), number), "place: ")
    tried(lambda: index.held(Slot(0), cast("Medium", medium)), "medium: ")
    tried(lambda: ApproximateIndex().touch(Slot(slot), prompt, 0.0), "slot: ")


class Boastful(Sequence[int]):
    """A sequence that says that it is as long as it likes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, _at: object) -> int:  # type: ignore[override]
        raise IndexError

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


@pytest.mark.parametrize("length", [2**40, 2**62])
def test_a_sequence_claiming_a_huge_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="tokens: at most"):
        Prompt(Boastful(length), block_size=1)
    with pytest.raises(TypeError, match="mm_hashes"):
        Prompt([1], block_size=1, mm_hashes=Boastful(length))  # type: ignore[arg-type]


def test_a_range_longer_than_any_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: at most"):
        Prompt(range(2**31), block_size=16)
