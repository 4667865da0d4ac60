"""A waiting room: requests that nobody may take now, in the order of their arrival."""

import asyncio

TRIES_PER_TURN = 16
"""How many of those who wait are decided afresh in one turn of the event loop."""


class WaitingRoom:
    """Parks requests until something changes; whoever is called is decided afresh, and keeps its place.

    A change calls the whole line, once: ``TRIES_PER_TURN`` in a turn of the event loop, which so stays free
    however many wait. Changes that come meanwhile count as one, and call the line again after that.
    """

    def __init__(self, *, places_max: int) -> None:
        self._places_max = places_max
        self._line: dict[int, Ticket] = {}
        self._number = 0
        self._called = 0
        self._last_to_call = 0
        self._has_changed = False
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
        if self._line:
            self._has_changed = True
            self._call_soon()

    def forget(self, number: int) -> None:
        """A ticket was given back."""
        self._line.pop(number, None)

    def _call_soon(self) -> None:
        if not self._call_is_due:
            self._call_is_due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        """Call the next piece of the line; one that came after the change has seen it already."""
        self._call_is_due = False
        if self._called >= self._last_to_call:
            self._has_changed = False
            self._called, self._last_to_call = 0, self._number
        first, last = self._called, self._last_to_call
        piece = [ticket for number, ticket in self._line.items() if first < number <= last]
        for ticket in piece[:TRIES_PER_TURN]:
            ticket.call()
        more = len(piece) > TRIES_PER_TURN
        self._called = piece[TRIES_PER_TURN - 1].number if more else last
        if more or self._has_changed:
            self._call_soon()


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
