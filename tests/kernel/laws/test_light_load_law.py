"""At light load equal ranks get equally many requests, however noisy their times are, and a slow one few."""

from collections import Counter
from statistics import fmean

import pytest

from kvrouter.core.ids import Slot
from tests.testing.light_load import LightLoad, Served

RANKS = 8
REQUESTS = 300
SEEDS = range(10)


def at_each_rank(served: list[Served]) -> list[int]:
    counts = Counter(one.slot for one in served)
    return [counts[Slot(slot)] for slot in range(RANKS)]


@pytest.mark.parametrize("at_once", [1, 3, 4])
@pytest.mark.parametrize("isl_tokens", [500, 3000])
def test_equal_ranks_get_equally_many_requests(at_once: int, isl_tokens: int) -> None:
    for seed in SEEDS:
        load = LightLoad(seed, n_workers=RANKS)
        served = load.run(REQUESTS, at_once=at_once, isl_tokens=isl_tokens)
        counts = at_each_rank(served)
        assert max(counts) <= 2 * min(counts), (seed, counts)
        alone_s = load.timing.prefill_ms(isl_tokens) / 1e3
        assert fmean(one.ttft_s for one in served) == pytest.approx(alone_s, rel=0.03), seed


@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_a_rank_1_5_times_slow_gets_less_than_half_of_its_share(at_once: int) -> None:
    for seed in SEEDS:
        load = LightLoad(seed, n_workers=RANKS, slowness={0: 1.5})
        counts = at_each_rank(load.run(REQUESTS, at_once=at_once))
        assert 2 <= counts[0] < REQUESTS / RANKS / 2, (seed, counts)
        assert max(counts[1:]) <= 2 * min(counts[1:]), (seed, counts)
