"""The law of kept speeds: a router that reads what another one saved predicts what that one would."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import Slot
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.kept_speeds import KeptSpeeds, KeptTimes
from kvrouter.kernel.placement.speeds import LearnedSpeeds
from tests.kernel.unit.test_learned_speeds import Ranks, rank
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

N_RANKS = 4
LATER_S = 5000.0
"""How much later the new router's clock is: it has nothing to do with the old one's."""

histories = st.lists(
    st.tuples(
        st.integers(0, N_RANKS - 1),  # the rank
        st.floats(0.2, 8.0),  # how many times as long it takes
        st.floats(0.01, 3.0),  # its plain seconds
        st.floats(0.0, 0.5),  # seconds of decode steps
        st.floats(0.0, 30.0),  # then nothing happens for so long
    ),
    max_size=60,
)


def after(history: list[tuple[int, float, float, float, float]]) -> Ranks:
    ranks = Ranks(N_RANKS)
    for slot, takes, plain_s, steps_s, pause_s in history:
        ranks.serve(slot, takes, plain_s=plain_s, steps_s=steps_s, client=slot)
        ranks.learned.answered(Slot(slot), 32, 0.5 * takes, step_s=0.01, client=slot, now_s=ranks.now_s)
        ranks.now_s += pause_s
    return ranks


def restarted(ranks: Ranks, *, aged_s: float = 0.0) -> Ranks:
    """A new router that reads what the old one saved ``aged_s`` ago; its workers joined in another order."""
    saved = msgspec.json.encode(ranks.learned.kept(MODEL, "timing", now_s=ranks.now_s))
    kept = msgspec.json.decode(saved, type=KeptSpeeds)
    new = Ranks(0)
    new.now_s = ranks.now_s + LATER_S + aged_s
    new.fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker_id in range(N_RANKS, 0, -1):
        new.fleet.join(card(worker_id, Role.BOTH))
    new.learned = LearnedSpeeds(new.fleet, RecordedPlacementEvents())
    for each in kept.ranks:
        slot = new.fleet.slot_of(each.rank)
        assert slot is not None
        new.learned.recall(kept, slot, each, aged_s=aged_s, now_s=new.now_s)
    return new


def known(ranks: Ranks) -> list[tuple[float, ...]]:
    """All that decisions and pages read, by worker."""
    speeds = ranks.learned.speeds(ranks.fleet.n_slots, now_s=ranks.now_s)
    found: list[tuple[float, ...]] = [(speeds.answer_s, speeds.interference)]
    for worker_id in range(1, N_RANKS + 1):
        slot = ranks.fleet.slot_of(rank(worker_id))
        assert slot is not None
        columns = (speeds.slowness[slot], speeds.decode_slowness[slot], speeds.turnover[slot])
        reading = ranks.learned.reading(slot)
        found.append((*map(float, columns), *((-1.0,) if reading is None else map(float, reading))))
    return found


def close(rows: list[tuple[float, ...]]) -> list[object]:
    return [pytest.approx(row, rel=1e-6, abs=1e-9) for row in rows]


@given(histories, st.floats(0.0, 600.0))
def test_a_restarted_router_knows_what_the_old_one_would_by_then(
    history: list[tuple[int, float, float, float, float]], away_s: float
) -> None:
    old = after(history)
    new = restarted(old, aged_s=away_s)
    old.now_s += away_s
    old.now_s += 1.0  # both look again
    new.now_s += 1.0
    assert known(new) == close(known(old))
    again = restarted(new)
    again.now_s += 1.0
    new.now_s += 1.0
    assert known(again) == close(known(new))


@given(histories.filter(lambda history: len(history) > 8))
def test_both_routers_learn_the_same_from_the_next_requests(
    history: list[tuple[int, float, float, float, float]],
) -> None:
    old = after(history)
    new = restarted(old)
    rng = Random(len(history))
    for each in (old, new):
        each.now_s += 20.0  # longer than any client's share counts
    for _ in range(N_RANKS):
        worker, takes = rng.randrange(N_RANKS), rng.uniform(0.5, 4.0)
        for each in (old, new):
            slot = each.fleet.slot_of(rank(worker + 1))
            assert slot is not None
            each.serve(slot, takes, client=1000 + rng.randrange(1 << 30))
            each.now_s += 20.0
    assert known(new) == close(known(old))


def test_a_kept_slowness_counts_in_full_after_an_hour_away() -> None:
    ranks = Ranks(N_RANKS)
    for _ in range(30):
        for slot, takes in enumerate((1.0, 1.0, 1.0, 3.0)):
            ranks.serve(slot, takes)
            ranks.learned.answered(Slot(slot), 32, 0.31 * takes, step_s=0.01, now_s=ranks.now_s)
    for away_s in (0.0, 3600.0):
        _, first, *_, last = known(restarted(ranks, aged_s=away_s))
        assert [last[work] / first[work] for work in (0, 1)] == [pytest.approx(3.0, rel=0.1)] * 2


def test_how_much_prompts_wait_for_decode_steps_is_kept() -> None:
    ranks = Ranks(N_RANKS)
    for number in range(80):
        steps_s = 0.05 * (number % 3)
        ranks.serve(number % N_RANKS, 1.0 - steps_s / 0.2, plain_s=0.2, steps_s=steps_s, client=number)
    ranks.now_s += 1.0
    (_, interference), *_ = known(ranks)
    assert interference < 0.5
    assert known(restarted(ranks))[0][1] == pytest.approx(interference)


def test_what_was_measured_since_the_start_is_not_replaced() -> None:
    ranks = Ranks(N_RANKS)
    ranks.serve_all([1.0, 1.0, 1.0, 3.0])
    kept = ranks.learned.kept(MODEL, "timing", now_s=ranks.now_s)
    new = Ranks(N_RANKS)
    new.serve_all([1.0, 1.0, 1.0, 1.0])
    before = known(new)
    for each in kept.ranks:
        slot = new.fleet.slot_of(each.rank)
        assert slot is not None
        new.learned.recall(kept, slot, each, aged_s=0.0, now_s=new.now_s)
    assert known(new) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", 0),
        ("plain", 0.0),
        ("plain", -1.0),
        ("last_ratio", 1e9),
        ("age_s", -1.0),
        ("taken", 1e99),
        ("for_trials_s", -1.0),
    ],
)
def test_kept_times_out_of_range_are_refused(field: str, value: float) -> None:
    good = KeptTimes(3, 1.0, 0.5, 0.5, 0.1, 0.2, 1.0, 9.0)
    content = msgspec.to_builtins(good) | {field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(content, KeptTimes)
    assert msgspec.convert(msgspec.to_builtins(good), KeptTimes) == good
