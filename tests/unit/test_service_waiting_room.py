"""The waiting room: places in a line, calls in order, nobody forgotten."""

import asyncio

from kvrouter.service.admission_queue import TRIES_PER_TURN, Ticket, WaitingRoom
from tests.support.waits import until


def soon_s() -> float:
    return asyncio.get_running_loop().time() + 30.0


class Line:
    """Waiters that note when they are called, and leave when ``serves`` says so."""

    def __init__(self, room: WaitingRoom, n: int, *, places: int) -> None:
        self.room = room
        self.calls: list[int] = []
        self.served: list[int] = []
        self.places = places
        self.tasks = [asyncio.create_task(self._wait(number, room.enter())) for number in range(n)]

    async def _wait(self, number: int, ticket: Ticket) -> None:
        try:
            while await ticket.wait(until_s=soon_s()):
                self.calls.append(number)
                if self.places:
                    self.places -= 1
                    self.served.append(number)
                    return
        finally:
            ticket.leave()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_change_calls_everyone_in_the_order_of_arrival() -> None:
    room = WaitingRoom(places_max=100)
    line = Line(room, 5, places=2)
    await asyncio.sleep(0)
    room.pulse()
    await until(lambda: len(line.calls) == 5)
    assert line.calls == [0, 1, 2, 3, 4]
    assert line.served == [0, 1], "who came first is served first"
    assert len(room) == 3
    line.places = 1
    room.pulse()
    await until(lambda: len(line.served) == 3)
    assert line.served == [0, 1, 2], "who was called in vain has kept its place"
    await line.close()
    assert len(room) == 0


async def test_one_change_serves_everyone_however_long_the_line() -> None:
    """A worker that joins changes the fleet once; nobody may wait for a second worker in vain."""
    n = 5 * TRIES_PER_TURN + 3
    room = WaitingRoom(places_max=1000)
    line = Line(room, n, places=n)
    await asyncio.sleep(0)
    room.pulse()
    await until(lambda: len(line.served) == n)
    assert line.served == list(range(n))
    assert len(room) == 0


async def test_changes_of_one_turn_count_as_one() -> None:
    room = WaitingRoom(places_max=10)
    line = Line(room, 2, places=0)
    await asyncio.sleep(0)
    for _ in range(50):
        room.pulse()
    for _ in range(10):
        await asyncio.sleep(0)
    assert line.calls == [0, 1]
    await line.close()


async def test_time_that_is_up_ends_a_wait() -> None:
    room = WaitingRoom(places_max=1)
    ticket = room.enter()
    now_s = asyncio.get_running_loop().time()
    assert not await ticket.wait(until_s=now_s)
    assert not await ticket.wait(until_s=now_s + 0.01)
    assert room.is_full, "the place is held until it is given back"
    ticket.leave()
    ticket.leave()
    assert len(room) == 0


async def test_a_room_is_full_when_its_places_are_taken() -> None:
    assert WaitingRoom(places_max=0).is_full
    room = WaitingRoom(places_max=2)
    tickets = [room.enter(), room.enter()]
    assert room.is_full
    tickets[0].leave()
    assert not room.is_full


async def test_a_long_line_is_called_in_pieces_and_a_change_in_between_calls_it_again() -> None:
    n = 2 * TRIES_PER_TURN
    room = WaitingRoom(places_max=1000)
    line = Line(room, n, places=0)
    await asyncio.sleep(0)
    room.pulse()
    await until(lambda: bool(line.calls))
    assert len(line.calls) <= TRIES_PER_TURN
    room.pulse()
    await until(lambda: len(line.calls) == 2 * n)
    assert line.calls == [*range(n), *range(n)]
    await line.close()
