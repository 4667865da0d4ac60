"""One watcher of a fleet's objects, which lists them again before it believes that a lease ran out."""

import asyncio
import time
from dataclasses import dataclass, replace

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.discovery.kubernetes.api import WorkersApi, reason
from kvrouter.planes.discovery.kubernetes.follow import Follow
from kvrouter.planes.discovery.kubernetes.objects import (
    Event,
    WorkerObject,
    decoded_event,
    record_of,
    worker_of,
)
from kvrouter.planes.discovery.kubernetes.server import STORE_ERRORS, ApiError
from kvrouter.planes.discovery.leases import CardLeases, Delivery, TroubleSink
from kvrouter.planes.discovery.refusals import Refusals

WORKERS_MAX = 16_384
"""How many workers one watcher follows; those beyond are told, and let go."""

REMOVALS_AT_ONCE = 64
"""How many objects that nobody renews are removed at one look."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An object as it was last seen to change."""

    stamp: tuple[str, str]
    at: float
    remove_after_s: float


class WorkersWatch(Follow[WorkerObject]):
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
        super().__init__(api, name="discovery: watch objects", tick_s=tick_s, quiet_s=quiet_s)
        self._api = api
        self._delivery = delivery
        self._fleet = fleet
        self._remove_after_s = remove_after_s
        self._refusals = refusals
        self._on_trouble = on_trouble
        self._leases = CardLeases()
        self._seen: dict[WorkerId, _Seen] = {}
        self._removes_at = 0.0
        self._is_cut_off = False

    def end(self) -> None:
        """Watch no more; idempotent."""
        self._delivery.end()
        super().end()

    def look(self, now: float) -> None:
        """See which leases run out."""
        self._leases.look(now)

    def is_in_doubt(self, now: float) -> bool:
        """Whether a lease ran out: its object is read again before that is believed."""
        return bool(self._leases.overdue(now))

    def cut_off(self) -> None:
        """Nothing is heard until the next list: no lease runs out meanwhile."""
        self._is_cut_off = True

    def lose(self, error: Exception) -> None:
        """The API server cannot be asked."""
        if not self._leases.is_lost:
            self._leases.lose()
            self._delivery.store(False, reason(error))

    def take_list(self, items: list[WorkerObject], asked_at: float) -> None:
        """Take what was asked for at ``asked_at``, and believe the leases that had run out by then."""
        now = time.monotonic()
        if self._is_cut_off:
            self._is_cut_off = False
            self._seen = {each: replace(seen, at=now) for each, seen in self._seen.items()}
            was_lost = self._leases.is_lost
            self._leases.regain(now)
            if was_lost:
                self._delivery.store(True, "")
        present = {self._take(each) for each in items}
        self._seen = {each: seen for each, seen in self._seen.items() if each in present}
        self._leases.forget(self._seen)
        self._delivery.changes(self._leases.expire(asked_at))

    def take_event(self, event: Event) -> str:
        """Take one change; return its version.

        An object that was deleted says nothing: anybody can delete. Its worker's next renewal writes it
        again, or its lease runs out.
        """
        found = decoded_event(event)
        if event.type == "DELETED":
            worker_id = worker_of(found, fleet=self._fleet)
            if worker_id is not None:
                self._seen.pop(worker_id, None)
                self._leases.forget(self._seen)
            self._refusals.forget(found.metadata.name)
        elif event.type != "BOOKMARK":
            self._take(found)
        return found.metadata.resource_version

    def _take(self, found: WorkerObject) -> WorkerId | None:
        """Take an object as it is now; return whose card it holds."""
        try:
            record = record_of(found, fleet=self._fleet)
            worker_id = record.card.worker_id
            if worker_id not in self._leases and len(self._leases) >= WORKERS_MAX:
                raise ProtocolError(f"more than {WORKERS_MAX} workers", param="worker_id")
        except ProtocolError as error:
            name = found.metadata.name
            self._refusals.tell(name, f"object {name[:80]}", error.message)
            return None
        self._refusals.forget(found.metadata.name)
        now, stamp = time.monotonic(), (found.metadata.uid, found.metadata.resource_version)
        seen = self._seen.get(worker_id)
        if seen is None or seen.stamp != stamp:
            self._seen[worker_id] = _Seen(stamp, now, max(self._remove_after_s, 10 * record.lease_s))
            self._delivery.changes(self._leases.hear(record, stamp, now))
        return worker_id

    async def tidy(self, now: float) -> None:
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
