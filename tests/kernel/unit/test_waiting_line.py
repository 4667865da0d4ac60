"""The waiting line: calls in order, in pieces, nobody forgotten."""

from collections import deque
from collections.abc import Callable

from kvrouter.core.requests import DEFAULT_LEVEL
from kvrouter.kernel.placement.waiting_line import HEAD_TRIES, TRIES_PER_TURN, Ticket, WaitingLine


class Turns:
    """Turns of an event loop, one by one."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def call_soon(self, call: Callable[[], None]) -> None:
        self._due.append(call)

    def one(self) -> None:
        """Run what is due now."""
        for _ in range(len(self._due)):
            self._due.popleft()()

    def all(self) -> None:
        """Run until nothing is due; fails when that never ends."""
        for _ in range(10_000):
            if not self._due:
                return
            self.one()
        raise AssertionError("the line calls for ever")


class Waiters:
    """Requests that note when they are called; the first ``places`` to try are served, and leave."""

    def __init__(self, n: int, *, places: int, line_places: int = 1000) -> None:
        self.turns = Turns()
        self.line = WaitingLine(places_max=line_places, call_soon=self.turns.call_soon)
        self.calls: list[int] = []
        self.served: list[int] = []
        self.places = places
        self.tickets: dict[int, Ticket] = {}
        for number in range(n):
            self.enter(number)

    def enter(self, number: int) -> None:
        self.tickets[number] = self.line.enter(lambda: self._called(number), DEFAULT_LEVEL, now_s=0.0)

    def _called(self, number: int) -> None:
        self.calls.append(number)
        if self.places:
            self.places -= 1
            self.served.append(number)
            self.tickets[number].leave()


def test_a_change_calls_all_waiting_requests_in_arrival_order() -> None:
    waiters = Waiters(5, places=2)
    waiters.line.pulse()
    assert not waiters.calls, "whoever changes something is not held up by those who wait"
    waiters.turns.all()
    assert waiters.calls == [0, 1, 2, 3, 4]
    assert waiters.served == [0, 1], "who came first is served first"
    assert len(waiters.line) == 3
    waiters.places = 1
    waiters.line.pulse()
    waiters.turns.all()
    assert waiters.served == [0, 1, 2], "who was called in vain has kept its place"


def test_a_change_serves_all_waiting_requests_of_a_long_line() -> None:
    """A worker that joins changes the fleet once; nobody may wait for a second worker in vain."""
    n = 5 * TRIES_PER_TURN + 3
    waiters = Waiters(n, places=n)
    waiters.line.pulse()
    waiters.turns.all()
    assert waiters.served == list(range(n))
    assert len(waiters.line) == 0


def test_several_changes_in_one_turn_call_the_line_once() -> None:
    waiters = Waiters(2, places=0)
    for _ in range(50):
        waiters.line.pulse()
    waiters.turns.all()
    assert waiters.calls == [0, 1]


def test_a_change_between_turns_calls_the_whole_line_once_after_it() -> None:
    n = 2 * TRIES_PER_TURN
    waiters = Waiters(n, places=0)
    waiters.line.pulse()
    waiters.turns.one()
    assert len(waiters.calls) == TRIES_PER_TURN
    waiters.line.pulse()
    waiters.turns.all()
    after = waiters.calls[TRIES_PER_TURN:]
    assert (after[:HEAD_TRIES], sorted(after)) == ([*range(HEAD_TRIES)], [*range(n)])


def test_a_place_that_is_freed_between_turns_goes_to_the_first_of_the_line() -> None:
    waiters = Waiters(3 * TRIES_PER_TURN, places=0)
    waiters.line.pulse()
    waiters.turns.one()
    waiters.places = 1
    waiters.line.pulse()
    waiters.turns.one()
    assert waiters.served == [0]
    waiters.turns.all()
    assert set(waiters.calls) == set(range(3 * TRIES_PER_TURN)), "the head keeps nobody from being called"


def test_a_request_that_entered_after_the_change_is_not_called() -> None:
    waiters = Waiters(TRIES_PER_TURN + 1, places=0)
    waiters.line.pulse()
    waiters.turns.one()
    waiters.enter(99)
    waiters.turns.all()
    assert 99 not in waiters.calls
    waiters.line.pulse()
    waiters.turns.all()
    assert waiters.calls[-1] == 99


def test_a_place_left_twice_is_given_back_once() -> None:
    waiters = Waiters(2, places=0, line_places=2)
    assert (waiters.line.is_full, len(waiters.line)) == (True, 2)
    waiters.tickets[0].leave()
    waiters.tickets[0].leave()
    assert (waiters.line.is_full, len(waiters.line)) == (False, 1)
    waiters.line.pulse()
    waiters.turns.all()
    assert waiters.calls == [1]


def test_a_line_without_places_is_full() -> None:
    assert WaitingLine(places_max=0, call_soon=Turns().call_soon).is_full
