"""A waiting room: requests that nobody may take now, in the order of their arrival."""

import asyncio
from itertools import islice

TRIES_PER_TURN = 16
"""How many of those who wait are decided afresh in one turn of the event loop."""


class WaitingRoom:
    """Parks requests until something changes; whoever is called is decided afresh, and keeps its place.

    Changes that come in one turn of the event loop count as one. A line longer than ``TRIES_PER_TURN`` is
    called piece by piece, so that a change costs no more than that, however many wait.
    """

    def __init__(self, *, places_max: int) -> None:
        self._places_max = places_max
        self._line: dict[int, Ticket] = {}
        self._number = 0
        self._called = 0
        self._call_is_due = False

    def __len__(self) -> int:
        return len(self._line)

    @property
    def is_full(self) -> bool:
        """True when one more request would be one too many."""
        return len(self._line) >= self._places_max

    def enter(self) -> "Ticket":
        """Take the last place in the line; whoever enters leaves by :meth:`Ticket.leave`."""
        self._number += 1
        ticket = self._line[self._number] = Ticket(self, self._number)
        return ticket

    def pulse(self) -> None:
        """Something changed: those who wait may try again."""
        if self._line and not self._call_is_due:
            self._call_is_due = True
            asyncio.get_running_loop().call_soon(self._call)

    def forget(self, number: int) -> None:
        """A ticket was given back."""
        self._line.pop(number, None)

    def _call(self) -> None:
        self._call_is_due = False
        if len(self._line) <= TRIES_PER_TURN:
            self._called = 0
        after = [ticket for number, ticket in self._line.items() if number > self._called]
        calls = list(islice(after, TRIES_PER_TURN)) or list(islice(self._line.values(), TRIES_PER_TURN))
        for ticket in calls:
            ticket.call()
        self._called = calls[-1].number if calls else 0


class Ticket:
    """One request's place in the line."""

    __slots__ = ("_future", "number", "room")

    def __init__(self, room: WaitingRoom, number: int) -> None:
        self.room = room
        self.number = number
        self._future: asyncio.Future[None] | None = None

    async def wait(self, *, until_s: float) -> bool:
        """Wait to be called; False when the loop's clock showed ``until_s`` first."""
        loop = asyncio.get_running_loop()
        if loop.time() >= until_s:
            return False
        self._future = loop.create_future()
        try:
            async with asyncio.timeout_at(until_s):
                await self._future
        except TimeoutError:
            return False
        finally:
            self._future = None
        return True

    def call(self) -> None:
        """Let the request try again; one that is trying already sees the change by itself."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def leave(self) -> None:
        """Give the place back; idempotent."""
        self.room.forget(self.number)
