"""A worker in standby: it begins once no other start of its id is announced."""

import asyncio
import logging

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.discovery.port import Discovery, Gone
from kvrouter.telemetry import Event, log_event

_log = logging.getLogger("kvrouter.worker")


class _Place:
    """Who has the place of one worker id, as discovery tells it."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id
        self._why_lost = ""
        self._is_lost = False
        self.holders: dict[Epoch, WorkerCard] = {}
        self.changed = asyncio.Event()

    @property
    def taken_by(self) -> str | None:
        """Why the place is not free: where its holder serves, or that nobody knows; None when it is free."""
        if self._is_lost:
            return f"discovery cannot be asked: {self._why_lost}"
        return next((f"it serves at {card.address}" for card in self.holders.values()), None)

    def on_card(self, card: WorkerCard) -> None:
        if card.worker_id == self._worker_id:
            self.holders[card.incarnation] = card
            self.changed.set()

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _: Gone) -> None:
        if worker_id == self._worker_id:
            self.holders.pop(incarnation, None)
            self.changed.set()

    def on_store(self, is_reachable: bool, why: str) -> None:
        self._is_lost, self._why_lost = not is_reachable, why
        self.changed.set()


async def until_free(discovery: Discovery, worker_id: WorkerId) -> None:
    """Wait until no start of the worker is announced: those that are have withdrawn, or their lease ran out.

    While discovery cannot be reached nobody is known to be gone. Who has the place is told once.
    """
    place = _Place(worker_id)
    end = await discovery.watch(place.on_card, place.on_gone, place.on_store)
    told: str | None = None
    try:
        while (taken_by := place.taken_by) is not None:
            if taken_by != told:
                log_event(_log, Event.WORKER_STANDBY, worker=str(worker_id), reason=taken_by)
                told = taken_by
            place.changed.clear()
            await place.changed.wait()
    finally:
        end()
