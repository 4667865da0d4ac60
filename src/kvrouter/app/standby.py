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
    """The registered starts of each worker id, as one watch of discovery reports them."""

    def __init__(self) -> None:
        self._cards: dict[WorkerId, dict[Epoch, WorkerCard]] = {}
        self._why_lost: str | None = None
        self._changes: dict[WorkerId, asyncio.Event] = {}

    async def until_free(self, worker_id: WorkerId) -> None:
        """Wait until no start of the worker is registered: each has deregistered, or its lease ran out.

        While discovery is unreachable every id counts as taken. The holder is logged once.
        """
        logged: str | None = None
        while (taken_by := self._taken_by(worker_id)) is not None:
            if taken_by != logged:
                log_event(_log, Event.WORKER_STANDBY, worker=str(worker_id), reason=taken_by)
                logged = taken_by
            await self._changes.setdefault(worker_id, asyncio.Event()).wait()

    def on_card(self, card: WorkerCard) -> None:
        """Handle a new or changed card."""
        self._cards.setdefault(card.worker_id, {})[card.incarnation] = card
        self._wake((card.worker_id,))

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _: Gone) -> None:
        """Handle a removed card."""
        starts = self._cards.get(worker_id, {})
        starts.pop(incarnation, None)
        if not starts:
            self._cards.pop(worker_id, None)
        self._wake((worker_id,))

    def on_store(self, is_reachable: bool, why: str) -> None:
        """Note whether discovery is reachable."""
        self._why_lost = None if is_reachable else why
        self._wake(tuple(self._changes))

    def _taken_by(self, worker_id: WorkerId) -> str | None:
        """Why the id is taken: where its holder serves, or discovery is unreachable; None when it is free."""
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
    """Follow the registered starts of all workers until the end."""
    known = Holders()
    end = await discovery.watch(known.on_card, known.on_gone, known.on_store)
    try:
        yield known
    finally:
        end()


async def until_free(discovery: Discovery, worker_id: WorkerId) -> None:
    """Wait until no start of this worker is registered, as :meth:`Holders.until_free` does."""
    async with holders(discovery) as known:
        await known.until_free(worker_id)
