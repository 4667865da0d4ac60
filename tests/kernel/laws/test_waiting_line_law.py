"""The order of a waiting line: by class, then by the time of entry less the priority; nobody is lost."""

from functools import partial
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.requests import ServiceLevel
from kvrouter.kernel.placement.waiting_line import Ticket, WaitingLine
from tests.kernel.unit.test_waiting_line import Turns

LEVELS = st.builds(
    ServiceLevel, strict_priority=st.integers(0, 2), priority_s=st.integers(-60, 60).map(float)
)
STEPS = st.lists(
    st.tuples(st.just("enter"), LEVELS) | st.tuples(st.sampled_from(["leave", "pulse", "turn"]), st.none()),
    max_size=120,
)


SLACKS_S = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=60)


@given(SLACKS_S)
def test_a_request_is_passed_only_by_those_that_come_within_its_slack(slacks_s: list[float]) -> None:
    turns, calls = Turns(), list[int]()
    line = WaitingLine(places_max=1000, call_soon=turns.call_soon)
    for number, slack_s in enumerate(slacks_s):
        line.enter(partial(calls.append, number), ServiceLevel(), now_s=float(number), slack_s=slack_s)
    line.pulse()
    turns.all()
    assert sorted(calls) == [*range(len(slacks_s))]
    for at, number in enumerate(calls):
        passing = [other for other in calls[:at] if other > number]
        assert all(other < number + slacks_s[number] for other in passing)


@given(STEPS, st.randoms(use_true_random=False))
def test_a_change_calls_everybody_in_order_of_class_and_entry(
    steps: list[tuple[str, ServiceLevel | None]], random: Random
) -> None:
    turns, calls = Turns(), list[int]()
    line = WaitingLine(places_max=1000, call_soon=turns.call_soon)
    waiting: dict[int, tuple[tuple[int, float, int], Ticket]] = {}
    for number, (step, level) in enumerate(steps):
        if step == "enter" and level is not None:
            ticket = line.enter(partial(calls.append, number), level, now_s=float(number))
            waiting[number] = ((-level.strict_priority, number - level.priority_s, number), ticket)
        elif step == "leave" and waiting:
            waiting.pop(random.choice([*waiting]))[1].leave()
        elif step == "pulse":
            line.pulse()
        elif step == "turn":
            turns.one()
    turns.all()
    calls.clear()
    line.pulse()
    turns.all()
    assert calls == sorted(waiting, key=lambda number: waiting[number][0])
    assert len(line) == len(waiting)
