"""The index of a simulation says what the router's says after the same events of engines' KV memory."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.events import Stored, pack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.engines.mock_engine.ranks import PagedKv
from kvrouter.kernel.index import ContentIndex, NativeBlockIndex

N_SLOTS = 5
PROMPTS = st.builds(
    lambda stem, length, tail: [stem] * length + tail,
    st.integers(0, 2),
    st.integers(0, 6),
    st.lists(st.integers(0, 2), max_size=4),
)
STEPS = st.lists(
    st.tuples(st.integers(0, N_SLOTS - 1), st.one_of(st.none(), PROMPTS)), min_size=1, max_size=60
)
"""A rank holds a prompt's blocks for a moment; None: it leaves, and its slot gets an empty rank."""


def kv(*, opaque: bool = False) -> PagedKv:
    return PagedKv(total_blocks=12, opaque=opaque, seed=0)


def prompt(blocks: list[int]) -> Prompt:
    return Prompt.from_blocks(pack_hashes(blocks), isl_tokens=4 * len(blocks) + 1, block_size=4)


def hold(rank: PagedKv, blocks: list[int]) -> None:
    names = pack_hashes(blocks)
    n_held = rank.matched(names, len(blocks))
    table = rank.hold(names, n_held, len(blocks) - n_held)
    assert table is not None
    rank.commit(table, names, len(blocks))
    rank.release(table)


@given(STEPS)
def test_a_simulations_index_equals_the_routers_after_the_same_events(
    steps: list[tuple[int, list[int] | None]],
) -> None:
    ours, routers = ContentIndex(), NativeBlockIndex()
    ranks = [kv() for _ in range(N_SLOTS)]
    asked = [[stem] * 6 for stem in range(3)]
    for slot, blocks in steps:
        if blocks is None:
            ranks[slot] = kv()
            ours.drop_rank(slot)
            while routers.drop_some(Slot(slot)).cleared:
                pass
        else:
            hold(ranks[slot], blocks)
            asked.append(blocks)
            events = ranks[slot].take_events()
            ours.apply(slot, events)
            routers.apply(Slot(slot), events)
        for each in asked:
            found, expected = np.ones(N_SLOTS, np.uint32), np.zeros(N_SLOTS, np.uint32)
            ours.overlap(prompt(each), found)
            routers.overlap(prompt(each), expected)
            assert list(found) == list(expected)


def test_a_column_without_a_place_for_each_slot_in_use_is_refused() -> None:
    index, rank = ContentIndex(), kv()
    hold(rank, [1, 2])
    events = rank.take_events()
    index.apply(1, events)
    index.apply(3, events)
    index.drop_rank(1)
    with pytest.raises(ValueError, match="out: a place for each of the slots in use"):
        index.overlap(prompt([1]), np.zeros(3, np.uint32))
    index.drop_rank(3)
    index.overlap(prompt([1]), np.zeros(0, np.uint32))


def test_a_block_that_is_not_named_by_its_content_is_refused() -> None:
    rank = kv(opaque=True)
    hold(rank, [1, 2])
    events = rank.take_events()
    event = events[0]
    assert isinstance(event, Stored)
    name = int.from_bytes(event.engine_hashes[:8], "little")
    with pytest.raises(ValueError, match=re.escape(f"events: block {name} is not named by its content")):
        ContentIndex().apply(0, events)
