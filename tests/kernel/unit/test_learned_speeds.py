"""What the placer learns of how fast ranks are."""

from math import log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrouter.core.ids import DpRank, Epoch, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.slowness import SLOW, SLOWNESS_MIN, TRIAL_SHARE
from kvrouter.kernel.placement.speeds import (
    CLIENT_WAITS_S,
    TURNOVER_ALIKE,
    TURNOVER_FLOOR,
    TURNOVER_S,
    Expected,
    LearnedSpeeds,
)
from kvrouter.kernel.routing.interface import Pick, Times
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card


class Ranks:
    """Ranks whose prompts take as long as a test says, one after another."""

    def __init__(self, n_ranks: int) -> None:
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        for worker_id in range(1, n_ranks + 1):
            self.fleet.join(card(worker_id, Role.BOTH))
        self.events = RecordedPlacementEvents()
        self.learned = LearnedSpeeds(self.fleet, self.events)
        self.n_ranks = n_ranks
        self.now_s = 1000.0
        self.slowness()

    def slowness(self) -> list[float]:
        speeds = self.learned.speeds(self.fleet.n_slots, now_s=self.now_s)
        return [float(value) for value in speeds.slowness]

    def serve(
        self,
        slot: int,
        takes: float,
        *,
        plain_s: float = 0.2,
        memory_s: float = 0.0,
        queue_s: float = 0.0,
        steps_s: float = 0.0,
        client: int = 0,
    ) -> None:
        """One request, that takes so many times as long as it would a rank of slowness 1."""
        expected = self.place(slot, plain_s=plain_s, memory_s=memory_s, queue_s=queue_s, steps_s=steps_s)
        self.now_s += takes * plain_s + queue_s + steps_s
        self.learned.observed(expected, client=client, now_s=self.now_s)

    def serve_at_once(self, slot: int, takes: list[float]) -> None:
        """Several, that are placed before the first of them is answered."""
        placed = [self.place(slot, plain_s=0.2, memory_s=0.0, queue_s=0.0, steps_s=0.0) for _ in takes]
        for expected, its in zip(placed, takes, strict=True):
            self.learned.observed(expected, now_s=self.now_s + 0.2 * its)
        self.now_s += 0.2 * max(takes)

    def place(
        self, slot: int, *, plain_s: float, memory_s: float, queue_s: float, steps_s: float
    ) -> Expected:
        slowness = self.slowness()[slot]
        times = Times(queue_s + steps_s, slowness * plain_s, memory_s, 0.0, 0.0, 0.0, 0.0)
        rank = self.fleet.rank_at(Slot(slot))
        assert rank is not None
        pick = Pick(Slot(slot), rank, Leg.AGGREGATED, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1, times=times)
        expected = self.learned.placed(pick, 1000, steps_s=steps_s, now_s=self.now_s)
        assert expected is not None
        return expected

    def serve_all(self, takes: list[float], n: int = 30) -> None:
        for _ in range(n):
            for slot, its in enumerate(takes):
                self.serve(slot, its)


def rank(worker_id: int) -> WorkerRank:
    return WorkerRank(WorkerId(worker_id), DpRank(0))


def test_each_rank_has_the_slowness_of_its_requests() -> None:
    ranks = Ranks(4)
    assert ranks.slowness() == [1.0] * 4
    ranks.serve_all([1.0, 1.0, 2.0, 5.0])
    assert ranks.slowness() == pytest.approx([1.0, 1.0, 2.0, 5.0], rel=0.02)


def test_a_client_has_a_limited_share_of_measurements_unless_alone() -> None:
    """Three of four requests at rank 0 are one client's, and take four times as long."""
    ranks, alone = Ranks(2), Ranks(2)
    for n in range(120):
        for slot in (0, 1):
            ranks.serve(slot, 1.0, client=1 + n % 5, plain_s=0.05)
        for _ in range(3):
            alone.serve(0, 4.0, client=9, plain_s=0.05)
            if n % 2:
                ranks.serve(0, 4.0, client=9, plain_s=0.05)
    assert ranks.slowness()[0] < 3.0
    assert alone.slowness()[0] == pytest.approx(4.0, rel=0.05)


def test_a_rank_used_by_one_client_is_measured_after_a_while() -> None:
    ranks = Ranks(2)
    for _ in range(20):
        ranks.serve(0, 1.0, client=1)
        ranks.serve(1, 1.0, client=2)
    for _ in range(24):
        ranks.now_s += CLIENT_WAITS_S
        ranks.serve(0, 4.0, client=9)
        for _ in range(4):
            ranks.serve(1, 1.0, client=2, plain_s=0.01)
    assert ranks.slowness()[0] > 2.5


def test_long_prompts_have_more_weight_than_short_delayed_prompts() -> None:
    ranks, rng = Ranks(2), Random(3)
    for _ in range(60):
        short, long = (0, 1) if rng.random() < 0.5 else (1, 0)
        ranks.serve(short, 4.0, plain_s=0.01)
        ranks.serve(long, 1.1, plain_s=1.0)
    assert ranks.slowness() == pytest.approx([1.1, 1.1], abs=0.1)


@pytest.mark.parametrize(("factor", "within"), [(1.7, 20), (2.5, 8), (4.0, 5), (20.0, 5)])
def test_a_slow_rank_and_its_recovery_are_noticed_within_so_many_requests(factor: float, within: int) -> None:
    ranks = Ranks(8)
    ranks.serve_all([1.0] * 8)
    assert ranks.events.turns == []
    n_requests = 0
    while not ranks.events.turns:
        ranks.now_s += 1.0
        ranks.serve(3, factor)
        n_requests += 1
        assert n_requests <= within
    assert ranks.events.turns[0][:2] == (rank(4), True)
    assert ranks.events.turns[0][2] > SLOW
    for _ in range(20):
        ranks.serve(3, factor)
    assert ranks.slowness()[3] == pytest.approx(factor, rel=0.35)
    for _ in range(80):
        ranks.serve(3, 1.0)
    assert [turn[:2] for turn in ranks.events.turns] == [(rank(4), True), (rank(4), False)]


def test_an_unmeasured_rank_has_the_median_slowness() -> None:
    ranks = Ranks(3)
    ranks.serve_all([3.0, 3.0, 3.0])
    ranks.fleet.join(card(9, Role.BOTH))
    ranks.now_s += 1.0
    assert ranks.slowness()[3] == pytest.approx(3.0, rel=0.02)
    ranks.serve(3, 1.0)
    assert ranks.slowness()[3] > 2.4


def test_a_fleet_that_left_hands_its_median_slowness_to_the_next() -> None:
    ranks = Ranks(3)
    ranks.serve_all([3.0, 3.0, 3.0])
    for worker_id in range(1, 4):
        for slot in ranks.fleet.leave(WorkerId(worker_id), Epoch(1)):
            ranks.learned.freed(slot)
    ranks.now_s += 60.0
    ranks.slowness()
    for worker_id in range(11, 15):
        ranks.fleet.join(card(worker_id, Role.BOTH))
    assert ranks.slowness() == pytest.approx([3.0] * 4, rel=0.02)


def offered(ranks: Ranks, plain_s: float) -> float:
    """The slowness of the last rank for a prompt that takes so long at slowness 1."""
    ranks.slowness()
    ranks.learned.offer(plain_s)
    return ranks.slowness()[-1]


def test_short_prompts_try_a_slow_rank_soon_and_long_ones_later() -> None:
    ranks, tried = Ranks(4), dict[float, int]()
    ranks.serve_all([1.0, 1.0, 1.0, 3.0])
    for number in range(3000):
        ranks.serve(number % 3, 1.0)
        ranks.now_s += 1.0
        for plain_s in (0.01, 0.1, 0.5):
            if offered(ranks, plain_s) == pytest.approx(1.0):
                tried.setdefault(plain_s, number)
    requests = {plain_s: 2.0 * plain_s / (TRIAL_SHARE / 4 * 0.2) for plain_s in (0.01, 0.1, 0.5)}
    assert tried == pytest.approx(requests, abs=4)


@given(st.lists(st.floats(0.01, 2.0), min_size=50, max_size=400), st.floats(1.5, 20.0))
@settings(max_examples=30)
def test_trials_of_slow_ranks_cost_a_small_share_of_all_seconds(lengths: list[float], slow: float) -> None:
    """Each prompt goes to a slow rank whenever it may try one."""
    ranks, rng = Ranks(4), Random(len(lengths))
    ranks.serve_all([1.0, 1.0, slow, slow])
    total_s = longer_s = 0.0
    for plain_s in lengths * 5:
        ranks.now_s += 1.0
        ranks.slowness()
        ranks.learned.offer(plain_s)
        may_try = [slot for slot in (2, 3) if ranks.slowness()[slot] == pytest.approx(1.0)]
        slot = rng.choice(may_try or [0, 1])
        takes = slow if may_try else 1.0
        ranks.serve(slot, takes, plain_s=plain_s)
        total_s += takes * plain_s
        longer_s += (takes - 1.0) * plain_s
    assert longer_s <= 1.01 * TRIAL_SHARE * total_s


def test_trials_that_begin_at_once_cost_no_more_than_one_after_another() -> None:
    ranks, n_trials = Ranks(4), 0
    ranks.serve_all([1.0, 1.0, 1.0, 3.0])
    for number in range(105):
        ranks.serve(number % 3, 1.0)
    ranks.now_s += 1.0
    while offered(ranks, 0.01) == pytest.approx(1.0):
        ranks.place(3, plain_s=0.01, memory_s=0.0, queue_s=0.0, steps_s=0.0)
        n_trials += 1
    assert n_trials == 2 == int(105 * 0.2 * TRIAL_SHARE / 4 / 0.02)


def test_a_rank_that_recovered_is_found_by_trials() -> None:
    ranks = Ranks(4)
    ranks.serve_all([1.0, 1.0, 1.0, 3.0])
    n_requests = 0
    while ranks.slowness()[3] > SLOW:
        n_requests += 1
        assert n_requests < 1500
        plain_s = 0.02 if n_requests % 4 else 0.2
        slot = 3 if offered(ranks, plain_s) == pytest.approx(1.0) else n_requests % 3
        ranks.serve(slot, 1.0, plain_s=plain_s)
        ranks.now_s += 1.0


def test_a_very_slow_request_changes_slowness_within_bounds() -> None:
    ranks = Ranks(2)
    ranks.serve_all([1.0, 1.0])
    ranks.serve(1, 1000.0)
    assert ranks.slowness()[1] < 1.3
    assert ranks.events.turns == []


def test_a_cold_rank_is_not_slow_unless_it_stays_slow() -> None:
    """What was placed before its first answer does not count where it takes long: at its start, and when its
    engine answers again, of which nothing from before counts.
    """
    ranks = Ranks(2)
    ranks.serve_all([1.0, 1.0])
    ranks.fleet.join(card(9, Role.BOTH))
    for is_silent in (False, True):
        if is_silent:
            for _ in range(9):
                ranks.serve(2, 4.0)
            assert ranks.slowness()[2] > 1.5
            ranks.fleet.join(replace(card(9, Role.BOTH), engine_silent=True))
            ranks.learned.fleet_changed()
            ranks.fleet.join(card(9, Role.BOTH))
            ranks.learned.fleet_changed()
        ranks.serve_at_once(2, [10.0, 11.0, 12.0, 13.0])
        assert ranks.slowness() == pytest.approx([1.0] * 3, rel=0.02)
        for _ in range(30):
            ranks.serve(2, 1.0)
    for _ in range(4):
        ranks.serve(2, 10.0)
    assert ranks.slowness()[2] > 1.5


def test_waits_for_memory_do_not_change_slowness() -> None:
    ranks = Ranks(2)
    ranks.serve_all([1.0, 1.0])
    for _ in range(90):
        ranks.serve(1, 50.0, memory_s=5.0)
    assert ranks.slowness() == pytest.approx([1.0, 1.0], rel=0.05)
    reading = ranks.learned.reading(Slot(1))
    assert reading is not None
    assert reading.seen_s == pytest.approx(10.0, rel=0.2)
    assert reading.predicted_s == pytest.approx(5.2, rel=0.05)


def test_a_freed_slot_drops_its_rank_and_ignores_a_late_first_token() -> None:
    ranks = Ranks(2)
    ranks.serve_all([1.0, 4.0])
    times = Times(0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    pick = Pick(Slot(1), rank(2), Leg.AGGREGATED, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1, times=times)
    expected = ranks.learned.placed(pick, 1000, steps_s=0.0, now_s=ranks.now_s)
    assert expected is not None
    for slot in ranks.fleet.leave(WorkerId(2), Epoch(1)):
        ranks.learned.freed(slot)
    ranks.learned.observed(expected, now_s=ranks.now_s + 9.0)
    assert ranks.learned.reading(Slot(1)) is None
    assert ranks.events.left == [rank(2)]


def test_cache_turnover_fades_and_is_relative_to_other_ranks() -> None:
    ranks = Ranks(2)

    def turnover() -> list[float]:
        speeds = ranks.learned.speeds(2, now_s=ranks.now_s)
        return [float(value) for value in speeds.turnover]

    for _ in range(5):
        ranks.serve(0, 1.0)
        ranks.now_s += 1.0
        turnover()
    hot, cold = turnover()
    assert hot == pytest.approx(log(2.0 / TURNOVER_FLOOR) - TURNOVER_ALIKE, rel=0.1)
    assert cold == 0.0
    for _ in range(int(8 * TURNOVER_S)):
        ranks.serve(1, 1.0, plain_s=0.001)
        ranks.now_s += 1.0
        turnover()
    hot, cold = turnover()
    assert hot == 0.0
    assert cold > 1.5


def test_ranks_with_similar_cache_turnover_count_as_equal() -> None:
    ranks = Ranks(2)
    for number in range(70):
        ranks.serve(int(number >= 38), 1.0)
    ranks.now_s += 1.0
    one, other = ranks.learned.speeds(2, now_s=ranks.now_s).turnover
    assert one == other == pytest.approx(-log(TURNOVER_FLOOR))


def test_answers_measure_decode_slowness_and_answer_time() -> None:
    ranks = Ranks(2)
    ranks.serve_all([1.0, 2.0])
    for _ in range(200):
        ranks.learned.answered(Slot(0), 401, 8.0, step_s=0.02, now_s=ranks.now_s)
        ranks.learned.answered(Slot(1), 401, 16.0, step_s=0.02, now_s=ranks.now_s)
        ranks.learned.answered(Slot(0), 1, 0.0, step_s=0.02, now_s=ranks.now_s)
    speeds = ranks.learned.speeds(2, now_s=ranks.now_s)
    assert list(speeds.decode_slowness) == pytest.approx([1.0, 2.0], rel=0.02)
    assert speeds.answer_s == pytest.approx(8.0 * 2 / 3, rel=0.1)
    assert list(speeds.slowness) == pytest.approx([1.0, 2.0], rel=0.02)


def test_fully_cached_prompts_do_not_measure_speed() -> None:
    ranks = Ranks(2)
    for _ in range(500):
        ranks.serve(0, 0.0, plain_s=0.0, queue_s=0.5)
        ranks.serve(1, 0.0, plain_s=0.0, steps_s=0.001)
    assert ranks.slowness() == [1.0, 1.0]
    assert ranks.events.turns == []


def test_decode_steps_of_other_requests_do_not_change_slowness() -> None:
    ranks = Ranks(2)
    for _ in range(40):
        ranks.serve(0, 2.0, plain_s=0.2, steps_s=0.05)
        ranks.serve(1, 2.0, plain_s=0.2)
        ranks.serve(1, 9.0, plain_s=0.01, steps_s=0.5)  # the wait is nearly all of it theirs
    assert ranks.slowness() == pytest.approx([2.0, 2.0], rel=0.02)


def test_slowness_never_falls_below_its_minimum() -> None:
    ranks = Ranks(2)
    for _ in range(200):
        ranks.serve(0, 0.0)
        ranks.learned.answered(Slot(0), 100, 0.0, step_s=0.02, now_s=ranks.now_s)
    assert ranks.slowness()[0] >= SLOWNESS_MIN
    assert ranks.learned.speeds(2, now_s=ranks.now_s).decode_slowness[0] >= SLOWNESS_MIN


def test_an_answer_before_the_first_speed_reading_is_accepted() -> None:
    ranks = Ranks(24)
    learned = LearnedSpeeds(ranks.fleet, ranks.events)
    learned.answered(Slot(23), 100, 4.0, step_s=0.02, now_s=1.0)
    assert len(learned.speeds(24, now_s=1.0).slowness) == 24
