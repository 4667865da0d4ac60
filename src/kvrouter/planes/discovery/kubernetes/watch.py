"""One watcher of a fleet's objects: lists them, hears what changes, and lists again before it believes that a
lease ran out.

A list and the watch that goes on from its version are one order of events, so nothing is missed, or heard
after what came later.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.kubernetes.api import STORE_ERRORS, ApiError, WorkersApi, reason
from kvrouter.planes.discovery.kubernetes.backoff import Backoff
from kvrouter.planes.discovery.kubernetes.objects import (
    Event,
    WorkerObject,
    decoded_event,
    record_of,
    worker_of,
)
from kvrouter.planes.discovery.leases import CardLeases, Delivery, TroubleSink

WORKERS_MAX = 16_384
"""How many workers one watcher follows; those beyond are told, and let go."""

LIVES_LEAST_S = 1.0
"""A watch that the API server ends sooner than this counts as broken."""

REFUSALS_MAX = 1024
"""How many objects that hold no card are told."""

REMOVALS_AT_ONCE = 64
"""How many objects that nobody renews are removed at one look."""


class Refusals:
    """Tells of objects that hold no card, each once until it holds one, however many watches see it."""

    def __init__(self, on_refused: TroubleSink) -> None:
        self._on_refused = on_refused
        self._told: set[str] = set()

    def tell(self, name: str, why: str) -> None:
        """``name`` holds no card."""
        if name not in self._told and len(self._told) < REFUSALS_MAX:
            self._told.add(name)
            self._on_refused(f"object {name[:80]}", why)

    def forget(self, name: str) -> None:
        """``name`` holds a card, or is gone."""
        self._told.discard(name)


class _Ends(Enum):
    """How a watch ended: the API server had it end, this end wants a list, or it broke."""

    BY_TIME = auto()
    ON_PURPOSE = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class _Seen:
    """An object as it was last seen to change."""

    stamp: tuple[str, str]
    at: float
    remove_after_s: float


class WorkersWatch:
    """Hears of writes as they happen; looks at the leases every ``tick_s``.

    When a lease has run out, or nothing was heard for ``quiet_s``, everything is listed anew. An API server
    that does not answer is lost; one that comes back gives every lease its whole length. An object that does
    not change for ``remove_after_s``, or for ten of its leases if that is more, is removed.
    """

    def __init__(
        self,
        api: WorkersApi,
        delivery: Delivery,
        *,
        fleet: str,
        tick_s: float,
        quiet_s: float,
        remove_after_s: float,
        refusals: Refusals,
        on_trouble: TroubleSink,
    ) -> None:
        self._api = api
        self._delivery = delivery
        self._fleet = fleet
        self._tick_s = tick_s
        self._quiet_s = quiet_s
        self._remove_after_s = remove_after_s
        self._refusals = refusals
        self._on_trouble = on_trouble
        self._leases = CardLeases()
        self._seen: dict[WorkerId, _Seen] = {}
        self._heard_at = 0.0
        self._removes_at = 0.0
        self._version = ""
        self._is_cut_off = False
        self._backoff = Backoff()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Deliver what is there, and go on watching; a store that does not answer is told, and waited for."""
        started = asyncio.get_running_loop().create_future()
        self._task = go_on(self._run(started), name="discovery: watch objects")
        # The task may end before it has looked, by a mistake of ours; it tells that itself.
        await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)

    def end(self) -> None:
        """Watch no more; idempotent."""
        self._delivery.end()
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
                wait_s = self._backoff.after(error)
                self._is_cut_off = True
                if not self._leases.is_lost:
                    self._leases.lose()
                    self._delivery.store(False, reason(error))
                if not started.done():
                    started.set_result(None)
            await asyncio.sleep(wait_s)

    async def _watch_once(self, started: "asyncio.Future[None]") -> float:
        """List, and hear what comes after until that has to begin anew; return in how many seconds.

        Raises one of STORE_ERRORS when the list cannot be had, or a watch cannot be opened after it.
        """
        asked_at = time.monotonic()
        self._leases.look(asked_at)
        objects, version = await self._api.everything()
        async with self._api.watch(version) as stream:
            self._version = version
            self._take_list(objects, asked_at)
            if not started.done():
                started.set_result(None)
            ends = await self._followed(stream)
        while ends is _Ends.BY_TIME:
            try:
                async with self._api.watch(self._version) as stream:
                    ends = await self._followed(stream)
            except STORE_ERRORS:
                ends = _Ends.BROKEN
        if ends is _Ends.ON_PURPOSE:
            return 0.0
        # It may be back at once, and is asked before anybody is told that it is lost.
        self._is_cut_off = True
        return self._backoff.after(ConnectionError())

    async def _followed(self, stream: AsyncIterator[list[Event]]) -> "_Ends":
        """Take what a watch brings until it ends; return how."""
        opened_at = time.monotonic()
        reading: asyncio.Task[list[Event] | None] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(_next(stream))
                await asyncio.wait({reading}, timeout=self._tick_s)
                now = time.monotonic()
                self._leases.look(now)
                if reading.done():
                    events, reading = reading.result(), None
                    if events is None:
                        return _Ends.BY_TIME if now - opened_at > LIVES_LEAST_S else _Ends.BROKEN
                    self._heard_at = now
                    for event in events:
                        self._take_event(event)
                    self._backoff.reset()
                elif self._leases.overdue(now) or now - self._heard_at > self._quiet_s:
                    return _Ends.ON_PURPOSE
                await self._remove_old(now)
        except STORE_ERRORS:
            return _Ends.BROKEN
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})

    def _take_list(self, objects: list[WorkerObject], asked_at: float) -> None:
        """Take what was asked for at ``asked_at``, and believe the leases that had run out by then."""
        now = time.monotonic()
        if self._is_cut_off:
            self._is_cut_off = False
            self._seen = {each: replace(seen, at=now) for each, seen in self._seen.items()}
            was_lost = self._leases.is_lost
            self._leases.regain(now)
            if was_lost:
                self._delivery.store(True, "")
        present = {self._take(each) for each in objects}
        self._seen = {each: seen for each, seen in self._seen.items() if each in present}
        self._leases.forget(self._seen)
        self._heard_at = now
        self._delivery.changes(self._leases.expire(asked_at))

    def _take_event(self, event: Event) -> None:
        """Take one change.

        An object that was deleted says nothing: anybody can delete. Its worker's next renewal writes it
        again, or its lease runs out.
        """
        found = decoded_event(event)
        self._version = found.metadata.resource_version
        if event.type == "DELETED":
            worker_id = worker_of(found, fleet=self._fleet)
            if worker_id is not None:
                self._seen.pop(worker_id, None)
                self._leases.forget(self._seen)
            self._refusals.forget(found.metadata.name)
        elif event.type != "BOOKMARK":
            self._take(found)

    def _take(self, found: WorkerObject) -> WorkerId | None:
        """Take an object as it is now; return whose card it holds."""
        try:
            record = record_of(found, fleet=self._fleet)
            worker_id = record.card.worker_id
            if worker_id not in self._leases and len(self._leases) >= WORKERS_MAX:
                raise ProtocolError(f"more than {WORKERS_MAX} workers", param="worker_id")
        except ProtocolError as error:
            self._refusals.tell(found.metadata.name, error.message)
            return None
        self._refusals.forget(found.metadata.name)
        now, stamp = time.monotonic(), (found.metadata.uid, found.metadata.resource_version)
        seen = self._seen.get(worker_id)
        if seen is None or seen.stamp != stamp:
            self._seen[worker_id] = _Seen(stamp, now, max(self._remove_after_s, 10 * record.lease_s))
            self._delivery.changes(self._leases.hear(record, stamp, now))
        return worker_id

    async def _remove_old(self, now: float) -> None:
        """Remove objects that nobody has written for long, as they were last seen."""
        if now < self._removes_at:
            return
        self._removes_at = now + self._remove_after_s / 10
        old = [each for each in self._seen.items() if now - each[1].at > each[1].remove_after_s]
        removals = [self._remove(worker_id, seen) for worker_id, seen in old[:REMOVALS_AT_ONCE]]
        await asyncio.gather(*removals)

    async def _remove(self, worker_id: WorkerId, seen: _Seen) -> None:
        try:
            await self._api.delete(worker_id, seen.stamp[1])
        except STORE_ERRORS as error:
            if not (isinstance(error, ApiError) and error.code in (404, 409)):
                self._on_trouble(f"worker {worker_id}", f"its old object cannot be removed: {reason(error)}")


async def _next(stream: AsyncIterator[list[Event]]) -> list[Event] | None:
    return await anext(stream, None)
