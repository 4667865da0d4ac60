"""At light load equal ranks get equally many tokens, however noisy their times are, and a slow one few."""

from collections import Counter
from collections.abc import Sequence

import pytest

from kvrouter.core.ids import Slot
from tests.testing.light_load import LightLoad, Served

RANKS = 8
REQUESTS = 300
SEEDS = range(10)
LENGTHS = [(500,), (3000,), (100, 300, 1000, 3000, 8000)]


def tokens_of_ranks(served: Sequence[Served]) -> list[int]:
    tokens = Counter[Slot]()
    for one in served:
        tokens[one.slot] += one.isl_tokens
    return [tokens[Slot(slot)] for slot in range(RANKS)]


@pytest.mark.parametrize("at_once", [1, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "long", "mixed"])
def test_equal_ranks_get_equally_many_tokens(at_once: int, lengths: Sequence[int]) -> None:
    for seed in SEEDS:
        served = LightLoad(seed, n_workers=RANKS).run(REQUESTS, at_once=at_once, lengths=lengths)
        tokens = tokens_of_ranks(served)
        assert max(tokens) <= 2 * min(tokens), (seed, tokens)
        assert sum(one.waited_s > 0.0 for one in served) <= REQUESTS / 50, seed


@pytest.mark.parametrize("at_once", [1, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "long", "mixed"])
def test_a_rank_1_5_times_slow_gets_few_after_20_requests(at_once: int, lengths: Sequence[int]) -> None:
    """Less than half of its share; it gets some, or it would not be known."""
    for seed in SEEDS:
        load = LightLoad(seed, n_workers=RANKS, slowness={0: 1.5})
        served = load.run(REQUESTS, at_once=at_once, lengths=lengths)
        at = [number for number, one in enumerate(served) if one.slot == 0]
        assert len(at) >= 2, seed
        assert len(at) <= 20 or len(at) - 20 < (REQUESTS - at[19]) / RANKS / 2, (seed, len(at))
        tokens = tokens_of_ranks(served)[1:]
        assert max(tokens) <= 2 * min(tokens), (seed, tokens)
