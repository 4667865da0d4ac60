"""Follows objects of an API server: list, watch, and list again with backoff when the watch breaks.

A list and the watch that goes on from its version are one order of events, so nothing is missed, or heard
after what came later.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.kubernetes.objects import WatchEvent
from kvrouter.transports.discovery.kubernetes.server import STORE_ERRORS

FIRST_S = 0.1
MOST_S = 5.0


def wait_after(failures: Failures, error: Exception) -> float:
    """Count ``error``; return the seconds to wait, at least as many as the server asks for.

    A chance part keeps many processes apart.
    """
    asked_s = float(getattr(error, "wait_s", 0.0))
    return max(failures.next_s(), asked_s) * random.uniform(1.0, 1.5)


LIVES_LEAST_S = 1.0
"""A watch that the API server ends sooner than this counts as broken."""

Item = TypeVar("Item")


class Objects(Protocol[Item]):
    """What can be listed and watched. Both raise one of STORE_ERRORS."""

    async def everything(self) -> tuple[list[Item], str]:
        """Return every object, and the version as of which they are all."""

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``, as it comes; it ends some time."""


class _Ends(Enum):
    """How a watch ended: the API server had it end, this end wants a list, or it broke."""

    BY_TIME = auto()
    ON_PURPOSE = auto()
    BROKEN = auto()


class Follow(ABC, Generic[Item]):
    """Hears of writes as they happen; checks what has expired every ``tick_s``.

    When nothing was heard for ``quiet_s``, or what is followed is in doubt, everything is listed again.
    """

    def __init__(self, objects: Objects[Item], *, name: str, tick_s: float, quiet_s: float) -> None:
        self._objects = objects
        self._name = name
        self._tick_s = tick_s
        self._quiet_s = quiet_s
        self._heard_at = 0.0
        self._version = ""
        self._failures = Failures(Backoff(FIRST_S, MOST_S))
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def take_list(self, items: list[Item], asked_at: float) -> None:
        """Take everything that was there at ``asked_at`` or later."""

    @abstractmethod
    def take_event(self, event: WatchEvent) -> str:
        """Take one change, or a bookmark; return its version. Raises ProtocolError for what is neither."""

    @abstractmethod
    def lose(self, error: Exception) -> None:
        """The list cannot be had, or no watch be opened after it: again at each try."""

    def cut_off(self) -> None:
        """Nothing is heard until the next list."""

    def look(self, now: float) -> None:
        """Check what has expired."""

    def is_in_doubt(self, now: float) -> bool:  # noqa: ARG002 - as above
        """Whether everything is to be listed again."""
        return False

    async def tidy(self, now: float) -> None:
        """Do what is to be done now and then."""

    async def start(self) -> None:
        """Deliver what is there and go on watching; report a store that does not answer, and wait for it."""
        started = asyncio.get_running_loop().create_future()
        self._task = go_on(self._run(started), name=self._name)
        # The task may end before it has listed anything, by a mistake of ours; it reports that itself.
        await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)

    def end(self) -> None:
        """Watch no more; idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self, started: "asyncio.Future[None]") -> None:
        while True:
            wait_s = 0.0
            try:
                wait_s = await self._watch_once(started)
            except STORE_ERRORS as error:
                wait_s = wait_after(self._failures, error)
                self.cut_off()
                self.lose(error)
                if not started.done():
                    started.set_result(None)
            await asyncio.sleep(wait_s)

    async def _watch_once(self, started: "asyncio.Future[None]") -> float:
        """List, and hear what comes after until that has to begin again; return in how many seconds.

        Raises one of STORE_ERRORS when the list cannot be had, or a watch cannot be opened after it.
        """
        asked_at = time.monotonic()
        self.look(asked_at)
        items, version = await self._objects.everything()
        async with self._objects.watch(version) as stream:
            self._version = version
            self._heard_at = time.monotonic()
            self.take_list(items, asked_at)
            if not started.done():
                started.set_result(None)
            ends = await self._followed(stream)
        while ends is _Ends.BY_TIME:
            try:
                async with self._objects.watch(self._version) as stream:
                    ends = await self._followed(stream)
            except STORE_ERRORS:
                ends = _Ends.BROKEN
        if ends is _Ends.ON_PURPOSE:
            return 0.0
        # It may be back at once, and is asked before anybody is notified that it is lost.
        self.cut_off()
        return wait_after(self._failures, ConnectionError())

    async def _followed(self, stream: AsyncIterator[list[WatchEvent]]) -> "_Ends":
        """Take what a watch brings until it ends; return how."""
        opened_at = time.monotonic()
        reading: asyncio.Task[list[WatchEvent] | None] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(_next(stream))
                await asyncio.wait({reading}, timeout=self._tick_s)
                now = time.monotonic()
                self.look(now)
                if reading.done():
                    events, reading = reading.result(), None
                    if events is None:
                        return _Ends.BY_TIME if now - opened_at > LIVES_LEAST_S else _Ends.BROKEN
                    self._heard_at = now
                    for event in events:
                        self._version = self.take_event(event)
                    self._failures.reset()
                elif self.is_in_doubt(now) or now - self._heard_at > self._quiet_s:
                    return _Ends.ON_PURPOSE
                await self.tidy(now)
        except STORE_ERRORS:
            return _Ends.BROKEN
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})


async def _next(stream: AsyncIterator[list[WatchEvent]]) -> list[WatchEvent] | None:
    return await anext(stream, None)
