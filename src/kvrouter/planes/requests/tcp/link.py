"""The way to one worker: connect when asked, stay connected while somebody watches, tell who answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from kvrouter.planes.background import go_on
from kvrouter.planes.requests.followers import Followers
from kvrouter.planes.requests.port import AliveSink, WorkerUnreachable
from kvrouter.planes.requests.tcp.router_end import RouterEnd

COMES_BACK_WITHIN_S = 0.1
"""How long a worker whose connection broke is still taken for alive, while a new one is made."""

Connect = Callable[[], Awaitable[RouterEnd]]
"""Return a connection on which the worker welcomed us; raise WorkerUnreachable."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before trying again: ``first_s``, twice that, up to ``most_s``; each cut by chance."""

    first_s: float
    most_s: float

    def wait_s(self, n_failed: int) -> float:
        """Return the seconds to wait after ``n_failed`` tries, 1 or more."""
        longest_s: float = min(self.most_s, self.first_s * 2.0 ** min(n_failed - 1, 30))
        return longest_s * random.uniform(0.5, 1.0)


class Link:
    """One worker address, and at most one connection to it."""

    def __init__(self, connect: Connect, backoff: Backoff, *, on_unused: Callable[[], None]) -> None:
        self._connect = connect
        self._backoff = backoff
        self._on_unused = on_unused
        self._end: RouterEnd | None = None
        self._attempt: asyncio.Task[RouterEnd] | None = None
        self._followers = Followers()
        self._keeper: asyncio.Task[None] | None = None
        self._is_alive = True
        self._came_up = asyncio.Event()

    @property
    def is_followed(self) -> bool:
        """Whether the connection is kept though nothing is sent."""
        return bool(self._followers)

    async def connected(self) -> RouterEnd:
        """Return the open connection, or the one that is being made; raise WorkerUnreachable."""
        if self._end is not None and not self._end.is_closed:
            return self._end
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._try())
            self._attempt.add_done_callback(self._tried)
        attempt = self._attempt
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if attempt.cancelled() and (task is None or not task.cancelling()):
                raise WorkerUnreachable("the plane was closed") from None
            raise

    def follow(self, sink: AliveSink) -> Callable[[], None]:
        """Keep the connection for ``sink``; return the function that ends it."""
        forget = self._followers.add(sink)
        if self._keeper is None:
            self._keeper = go_on(self._keep(), name="requests: stay connected")
        elif not self._is_alive:
            asyncio.get_running_loop().call_soon(self._tell_late)

        def end() -> None:
            forget()
            if not self._followers and self._keeper is not None:
                self._keeper.cancel()
                self._keeper = None
                self._is_alive = True
                self._drop_if_unused()

        return end

    def close(self, reason: str) -> RouterEnd | None:
        """End everything; return the connection that is closing, for its last bytes to be awaited."""
        self._followers = Followers()
        for task in (self._keeper, self._attempt):
            if task is not None:
                task.cancel()
        self._keeper = None
        if self._end is not None:
            self._end.close(reason)
        return self._end

    async def _try(self) -> RouterEnd:
        end = await self._connect()
        end.lost.add_done_callback(lambda _: self._lost(end))
        self._end = end
        self._came_up.set()
        return end

    def _tried(self, attempt: asyncio.Task[RouterEnd]) -> None:
        self._attempt = None
        if attempt.cancelled() or attempt.exception() is not None:  # whoever asked has been told
            self._drop_if_unused()

    def _lost(self, end: RouterEnd) -> None:
        if self._end is end:
            self._end = None
            self._came_up.clear()
            self._drop_if_unused()

    def _drop_if_unused(self) -> None:
        if not self._followers and self._end is None and self._attempt is None:
            self._on_unused()

    async def _keep(self) -> None:
        n_failed = 0
        while True:
            try:
                end = await self.connected()
            except WorkerUnreachable:
                self._tell(is_alive=False)
                n_failed += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._backoff.wait_s(n_failed)):
                        await self._came_up.wait()
                continue
            n_failed = 0
            self._tell(is_alive=True)
            await asyncio.wait([end.lost])
            if not await self._comes_back():
                self._tell(is_alive=False)

    async def _comes_back(self) -> bool:
        """Whether the worker takes a new connection at once: then only the old one died, not the worker."""
        try:
            async with asyncio.timeout(COMES_BACK_WITHIN_S):
                await self.connected()
        except (WorkerUnreachable, TimeoutError):
            return False
        return True

    def _tell(self, *, is_alive: bool) -> None:
        self._is_alive = is_alive
        self._followers.tell(is_alive=is_alive)

    def _tell_late(self) -> None:
        self._followers.tell(is_alive=self._is_alive)
