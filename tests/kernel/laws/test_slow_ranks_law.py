"""Equal ranks are not said to be slow, however noisy their requests are; a slower one is, and soon."""

from math import exp
from random import Random

import pytest

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.speeds import LearnedSpeeds
from kvrouter.kernel.routing.interface import Pick, Times
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

RANKS = 300
ROUNDS = 200
"""Each of them a request for each rank, 60,000 in all."""


class NoisyRanks:
    """Ranks whose prompts have drawn lengths and take drawn times: mostly within a third of each other, one
    in fifty up to six times as long, and now and then an engine pauses and delays all that is there.
    """

    def __init__(self, seed: int, slowness: dict[int, float]) -> None:
        self.rng = Random(seed)
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        for worker_id in range(1, RANKS + 1):
            self.fleet.join(card(worker_id, Role.BOTH))
        self.events = RecordedPlacementEvents()
        self.learned = LearnedSpeeds(self.fleet, self.events)
        self.slowness = slowness
        self.now_s = 1000.0

    def round(self) -> None:
        """Each rank answers one request, or several at once after a pause."""
        rng, begun_s = self.rng, self.now_s
        for slot in map(Slot, range(RANKS)):
            pause_s = rng.uniform(0.5, 4.0) if rng.random() < 0.002 else 0.0
            for _ in range(16 if pause_s else 1):
                plain_s = min(exp(rng.gauss(-2.0, 1.0)), 4.0)
                takes = exp(rng.gauss(0.0, 0.3)) * self.slowness.get(slot, 1.0)
                if rng.random() < 0.02:
                    takes *= rng.uniform(2.0, 6.0)
                self.serve(slot, plain_s, takes * plain_s + pause_s, begun_s)
        self.now_s = begun_s + 1.0

    def serve(self, slot: Slot, plain_s: float, takes_s: float, begun_s: float) -> None:
        speeds = self.learned.speeds(RANKS, now_s=begun_s)
        times = Times(0.0, float(speeds.slowness[slot]) * plain_s, 0.0, 0.0, 0.0, 0.0, 0.0)
        pick = Pick(slot, self.rank(slot), Leg.AGGREGATED, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1, times=times)
        expected = self.learned.placed(pick, 1000, steps_s=0.0, now_s=begun_s)
        assert expected is not None
        self.learned.observed(expected, client=self.rng.randrange(20), now_s=begun_s + takes_s)

    def rank(self, slot: Slot) -> WorkerRank:
        rank = self.fleet.rank_at(slot)
        assert rank is not None
        return rank

    def slow(self) -> list[int]:
        """The slots that are said to be slow now."""
        readings = ((slot, self.learned.reading(Slot(slot))) for slot in range(RANKS))
        return [slot for slot, reading in readings if reading is not None and reading.is_slow]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_equal_rank_is_said_to_be_slow_in_60_000_requests(seed: int) -> None:
    ranks = NoisyRanks(seed, {})
    for _ in range(ROUNDS):
        ranks.round()
        assert ranks.slow() == []


def test_slower_ranks_are_said_to_be_slow_and_no_others() -> None:
    """From 1.7 times on within 40 requests; where half of a request's noise is as much, within 150."""
    slowness = {slot: 1.5 + 0.1 * (slot // 5 % 6) for slot in range(0, 90, 5)}
    ranks = NoisyRanks(3, slowness)
    said: dict[int, int] = {}
    for number in range(1, 151):
        ranks.round()
        for slot in ranks.slow():
            said.setdefault(slot, number)
    assert said.keys() == slowness.keys()
    assert max(number for slot, number in said.items() if slowness[slot] > 1.65) <= 40
