"""The order of a waiting line: by class, then by the time of entry less the priority; nobody is lost."""

from collections.abc import Callable
from functools import partial
from itertools import count, islice
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.requests import DEFAULT_LEVEL, ServiceLevel
from kvrouter.kernel.placement.waiting_line import HEAD_TRIES, TRIES_PER_TURN, Ticket, WaitingLine
from tests.kernel.unit.test_waiting_line import Turns

LEVELS = st.builds(
    ServiceLevel, strict_priority=st.integers(0, 2), priority_s=st.integers(-60, 60).map(float)
)
STEPS = st.lists(
    st.tuples(st.just("enter"), LEVELS) | st.tuples(st.sampled_from(["leave", "pulse", "turn"]), st.none()),
    max_size=120,
)


MOVES = st.lists(
    st.tuples(st.just("come"), LEVELS, st.just(0))
    | st.tuples(st.just("free"), st.none(), st.integers(1, 30))
    | st.tuples(st.just("turn"), st.none(), st.just(0)),
    max_size=150,
)


class Takers:
    """Requests that each take one of equal seats, in a line where they wait for one."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.line = WaitingLine(places_max=1000, call_soon=self.turns.call_soon)
        self.seats = self.now_s = 0
        self.waiting: dict[int, Ticket] = {}

    def come(self, level: ServiceLevel) -> None:
        """A newcomer tries at once, unless others are due."""
        self.now_s += 1
        number = self.now_s
        is_tried = not self.line.has_calls_due
        if is_tried and self.seats:
            self.take((-level.strict_priority, number - level.priority_s, 10**6))
            return
        called = partial(self.called, number)
        self.waiting[number] = self.line.enter(called, level, now_s=float(number), is_tried=is_tried)

    def called(self, number: int) -> None:
        """A waiting request tries again."""
        if self.seats:
            ticket = self.waiting.pop(number)
            ticket.leave()
            self.take(ticket.key)

    def take(self, key: tuple[int, float, int]) -> None:
        """Take a seat."""
        self.seats -= 1
        assert all(other.key > key for other in self.waiting.values()), "somebody was passed"


@given(MOVES)
def test_nobody_is_passed_by_a_later_one_or_by_a_newcomer(
    moves: list[tuple[str, ServiceLevel | None, int]],
) -> None:
    takers = Takers()
    for move, level, seats in moves:
        if level is not None:
            takers.come(level)
        elif move == "free":
            takers.seats += seats
            takers.line.pulse()
        else:
            takers.turns.one()
    takers.turns.all()
    assert not takers.seats or not takers.waiting


class PlainLine:
    """Waiting requests by number, where each turn lists anew who did not try since the last change."""

    def __init__(self, called: Callable[[int], None]) -> None:
        self.called = called
        self.tried: dict[int, int] = {}
        self.changes = 0
        self.last: int | None = None
        self.is_due = False

    def pulse(self) -> None:
        if self.tried:
            self.changes, self.is_due = self.changes + 1, True

    def turn(self) -> None:
        if not self.is_due:
            return
        self.is_due = False
        due = [number for number, tried in sorted(self.tried.items()) if tried < self.changes]
        first = 0 if self.last is None else sum(number <= self.last for number in due)
        n_head = n_refused = 0
        while n_head < min(first, TRIES_PER_TURN) and n_refused < HEAD_TRIES:
            n_refused += self.is_refused(due[n_head])
            n_head += 1
        later = due[first : first + TRIES_PER_TURN - n_head]
        for number in later:
            self.is_refused(number)
        if first + len(later) == len(due):
            self.last = None
        elif later:
            self.last = later[-1]
        self.is_due |= n_head + len(later) < len(due)

    def is_refused(self, number: int) -> bool:
        self.tried[number] = self.changes
        self.called(number)
        return number in self.tried


LINE_STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter new"]), st.integers(1, 30))
    | st.tuples(st.sampled_from(["leave", "turn", "turn", "pulse", "free"]), st.integers(0, 9)),
    max_size=80,
)


@given(LINE_STEPS)
def test_calls_come_in_the_order_of_a_line_that_is_listed_anew_each_turn(
    steps: list[tuple[str, int]],
) -> None:
    """A called request takes a seat if one is free; every fifth that does changes something again."""
    turns, seats, numbers = Turns(), [0, 0], count()
    line = WaitingLine(places_max=10_000, call_soon=turns.call_soon)
    calls: tuple[list[int], list[int]] = ([], [])
    tickets: dict[int, Ticket] = {}

    def called(side: int, number: int) -> None:
        calls[side].append(number)
        if not seats[side]:
            return
        seats[side] -= 1
        if side:
            tickets.pop(number).leave()
        else:
            del plain.tried[number]
        if number % 5 == 0:
            (line if side else plain).pulse()

    plain = PlainLine(partial(called, 0))
    for step, n in [*steps, *[("turn", 0)] * 40]:
        if step.startswith("enter"):
            for number in islice(numbers, n):
                is_tried = step == "enter"
                tickets[number] = line.enter(
                    partial(called, 1, number), DEFAULT_LEVEL, now_s=0.0, is_tried=is_tried
                )
                plain.tried[number] = plain.changes if is_tried else -1
                plain.is_due |= not is_tried
        elif step == "leave" and n in tickets:
            tickets.pop(n).leave()
            del plain.tried[n]
        elif step == "free":
            seats[:] = [each + n for each in seats]
        elif step == "pulse":
            line.pulse()
            plain.pulse()
        elif step == "turn":
            turns.one()
            plain.turn()
        assert calls[0] == calls[1]


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
