"""Stores snapshots of the index rank by rank once an event stream is too long; the stream is then purged."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator

from kvrouter.core.errors import KvrouterError
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.model_router import ModelRouter
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import spawn
from kvrouter.transports.events.port import PendingSnapshot, SnapshotStore

logger = logging.getLogger("kvrouter.router")

CHECK_S = 5.0
"""Seconds between two checks of the streams' length."""

JITTER = 0.2
"""Random share by which the time between two checks varies, so that replicas do not check together."""


def fed_caches(models: Iterable[ModelRouter]) -> Iterator[EventCacheView]:
    """The cache views of ``models`` that KV events feed."""
    return (model.cache for model in models if isinstance(model.cache, EventCacheView))


class IndexSnapshots:
    """Stores a snapshot of each component whose stream holds more than ``messages_max`` messages.

    One replica of all takes it. Routing goes on meanwhile: a few thousand blocks are read in one turn of the
    event loop. A rank whose feed is not live is left out; routers that start from the snapshot ask its
    worker.
    """

    def __init__(
        self,
        store: SnapshotStore,
        caches: Callable[[], Iterable[EventCacheView]],
        *,
        messages_max: int,
        check_s: float = CHECK_S,
        seed: int = 0,
    ) -> None:
        self._store = store
        self._caches = caches
        self._messages_max = messages_max
        self._check_s = check_s
        self._random = random.Random(seed)
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self) -> None:
        """Start the periodic check on the running loop."""
        if self._task is None:
            self._is_over = False
            self._task = spawn(self._run(), name="index: take snapshots")

    async def stop(self) -> None:
        """Stop the check; a snapshot in progress is abandoned."""
        if self._task is not None:
            self._is_over = True  # a task's cancellation can get lost in a client's own waiting
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def check(self) -> int:
        """Check once; return how many snapshots were stored."""
        taken = 0
        try:
            for component in await self._store.overdue(messages_max=self._messages_max):
                taken += await self._take(component)
        except (KvrouterError, OSError) as error:
            log_event(logger, Event.INDEX_NOT_STORED, reason=str(error))
        return taken

    async def _run(self) -> None:
        while not self._is_over:
            await asyncio.sleep(self._check_s * self._random.uniform(1 - JITTER, 1 + JITTER))
            await self.check()

    async def _take(self, component: str) -> bool:
        taking = await self._store.take(component)
        if taking is None:
            return False
        began_s = asyncio.get_running_loop().time()
        is_done = False
        try:
            ranks, blocks = await self._add_all(taking)
            if ranks:
                await taking.commit()
                is_done = True
        finally:
            if not is_done:
                await taking.abandon()
        if is_done:
            log_event(
                logger,
                Event.INDEX_STORED,
                duration_s=asyncio.get_running_loop().time() - began_s,
                detail=f"{component}: {ranks} ranks, {blocks} blocks",
            )
        return is_done

    async def _add_all(self, taking: PendingSnapshot) -> tuple[int, int]:
        """Add every live rank that ``taking`` covers; return the numbers of ranks and blocks."""
        ranks = blocks = 0
        for cache in list(self._caches()):
            for slot, _ in list(cache.ingest.feeds()):
                await asyncio.sleep(0)
                feed = cache.ingest.feed_at(slot)  # another rank may have the slot by now
                if feed is None or not taking.covers(feed.rank):
                    continue
                snapshot = await cache.ingest.snapshot(slot)
                if snapshot is not None:
                    await taking.add(snapshot)
                    ranks += 1
                    blocks += sum(event.n_blocks for event in snapshot.events)
        return ranks, blocks
