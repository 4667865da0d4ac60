"""The time that an event loop was awake: by it one tells whether a peer was silent, or this end deaf."""

import asyncio

TICKS_COUNTED = 2
"""How many ticks one tick counts for at most, however late it comes."""


class AwakeClock:
    """A clock that stands still while its loop does. It advances by ticks, of about ``every_s`` seconds.

    When a loop was held up for long, what its peers said meanwhile is not read yet when its timers go off: by
    a common clock all of them would seem to be dead.
    """

    def __init__(self, every_s: float) -> None:
        self.now_s = 0.0
        self._every_s = every_s

    async def tick(self) -> None:
        """Wait for the next tick."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.sleep(self._every_s)
        self.now_s += min(loop.time() - began_s, TICKS_COUNTED * self._every_s)
