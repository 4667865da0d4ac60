"""Standby: a worker starts once no other start of its id is registered."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.records.port import Discovery, Gone

_log = logging.getLogger("kvrouter.worker")


class Holders:
    """Who has the place of each worker id, as one watch of discovery reports it."""

    def __init__(self) -> None:
        self._cards: dict[WorkerId, dict[Epoch, WorkerCard]] = {}
        self._why_lost: str | None = None
        self._changes: dict[WorkerId, asyncio.Event] = {}

    async def until_free(self, worker_id: WorkerId) -> None:
        """Wait until no start of the worker is announced: those that are have withdrawn, or their lease ran
        out.

        While discovery cannot be reached nobody is known to be gone. Who has the place is logged once.
        """
        logged: str | None = None
        while (taken_by := self._taken_by(worker_id)) is not None:
            if taken_by != logged:
                log_event(_log, Event.WORKER_STANDBY, worker=str(worker_id), reason=taken_by)
                logged = taken_by
            await self._changes.setdefault(worker_id, asyncio.Event()).wait()

    def on_card(self, card: WorkerCard) -> None:
        """A worker is announced, or changed."""
        self._cards.setdefault(card.worker_id, {})[card.incarnation] = card
        self._wake((card.worker_id,))

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _: Gone) -> None:
        """A start of a worker is gone."""
        starts = self._cards.get(worker_id, {})
        starts.pop(incarnation, None)
        if not starts:
            self._cards.pop(worker_id, None)
        self._wake((worker_id,))

    def on_store(self, is_reachable: bool, why: str) -> None:
        """Discovery can be asked again, or not any more."""
        self._why_lost = None if is_reachable else why
        self._wake(tuple(self._changes))

    def _taken_by(self, worker_id: WorkerId) -> str | None:
        """Why the place is not free: where its holder serves, or that nobody knows; None when it is free."""
        if self._why_lost is not None:
            return f"discovery cannot be asked: {self._why_lost}"
        starts = self._cards.get(worker_id, {})
        return next((f"it serves at {card.address}" for card in starts.values()), None)

    def _wake(self, worker_ids: Iterable[WorkerId]) -> None:
        for worker_id in worker_ids:
            changed = self._changes.pop(worker_id, None)
            if changed is not None:
                changed.set()


@asynccontextmanager
async def holders(discovery: Discovery) -> AsyncIterator[Holders]:
    """Who has which place, followed until the end."""
    known = Holders()
    end = await discovery.watch(known.on_card, known.on_gone, known.on_store)
    try:
        yield known
    finally:
        end()


async def until_free(discovery: Discovery, worker_id: WorkerId) -> None:
    """Wait until no start of this one worker is announced, as :meth:`Holders.until_free` does."""
    async with holders(discovery) as known:
        await known.until_free(worker_id)
