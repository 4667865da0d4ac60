"""The waiting room: requests that nobody may take now, each with its own last moment."""

import asyncio

from kvrouter.core.errors import RoutingRefused


class WaitingRoom:
    """Parks requests until the fleet changes; whoever leaves is decided afresh.

    ``places_max`` bounds it: with 0 nobody waits. A pulse wakes everyone in the order of arrival, so that the
    first to come is the first to be decided.
    """

    def __init__(self, *, places_max: int) -> None:
        self._places_max = places_max
        self._waiting: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True when one more request would be one too many."""
        return len(self._waiting) >= self._places_max

    def pulse(self) -> None:
        """Something changed: let everyone try again."""
        if not self._waiting:
            return
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, refused: RoutingRefused, *, until_s: float) -> None:
        """Wait for the next change, until the loop's clock shows ``until_s``; then raise ``refused``."""
        loop = asyncio.get_running_loop()
        if loop.time() >= until_s or self.is_full:
            raise refused
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout_at(until_s):
                await future
        except TimeoutError:
            raise refused from None
        finally:
            if future in self._waiting:
                self._waiting.remove(future)
