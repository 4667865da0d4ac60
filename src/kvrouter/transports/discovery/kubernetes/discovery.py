"""Discovery by objects of a Kubernetes API server."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.kube.client import CONFLICT, NOT_FOUND, ClusterError, ClusterUser, RequestRefused
from kvrouter.kube.informer import wait_after
from kvrouter.kube.objects import WatchEvent
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.card_publisher import HeldCards
from kvrouter.transports.discovery.card_tracker import (
    RENEWALS_PER_LEASE,
    CardLeases,
    OpenWatches,
    StoreRefusals,
    TroubleSink,
    WatcherSinks,
)
from kvrouter.transports.discovery.kubernetes.api import (
    RETRY_MAX_S,
    RETRY_S,
    Follow,
    WorkersApi,
    reason,
)
from kvrouter.transports.discovery.kubernetes.objects import (
    OwnerPod,
    OwnerReference,
    WorkerObject,
    checked_fleet,
    decoded_event,
    encode_object,
    record_of,
    worker_of,
)
from kvrouter.transports.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.discovery.records import OtherWrote
from kvrouter.transports.discovery.wire import CardRecord, checked_lease


class Stood(NamedTuple):
    """What is stored under a worker's name: its version, and who owns it."""

    version: str
    owners: tuple[OwnerReference, ...]


class ObjectCards:
    """One object for each record, owned by ``pod`` where it is written here. Withdrawing changes no owner."""

    errors: tuple[type[Exception], ...] = (ClusterError, ProtocolError)

    def __init__(self, api: WorkersApi, *, fleet: str, pod: OwnerPod | None) -> None:
        self._api = api
        self._fleet = fleet
        self._owners = () if pod is None else (pod.reference(),)
        self._writes = 0

    def reason(self, error: Exception) -> str:
        """What ``error`` says, in a line that a person can act on."""
        return reason(error)

    async def read(self, key: str) -> tuple[CardRecord | None, Stood | None]:
        """Return what is there."""
        found = await self._api.read(WorkerId(int(key)))
        if found is None:
            return None, None
        try:
            return record_of(found, fleet=self._fleet), _stood(found)
        except ProtocolError:
            return None, _stood(found)

    async def put_over(self, record: CardRecord, over: Stood | None) -> Stood:
        """Write over a version, or where none is. Raises OtherWrote when something else is there."""
        self._writes += 1
        body = encode_object(
            record,
            fleet=self._fleet,
            renewals=self._writes,
            replaces=None if over is None else over.version,
            owners=over.owners if over is not None and record.withdrawn else self._owners,
        )
        try:
            if over is None:
                return _stood(await self._api.create(body))
            return _stood(await self._api.replace(record.card.worker_id, body))
        except RequestRefused as error:
            if error.status == CONFLICT or (error.status == NOT_FOUND and over is not None):
                raise OtherWrote(f"the object of worker {record.card.worker_id} is another by now") from error
            raise


def _stood(found: WorkerObject) -> Stood:
    return Stood(found.metadata.resource_version, found.metadata.owner_references)


WORKERS_MAX = 16_384
"""How many workers one watcher follows; those beyond are reported, and not followed."""

REMOVALS_AT_ONCE = 64
"""How many objects that nobody renews are removed in one check."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An object as it was last seen to change."""

    stamp: tuple[str, str]
    at: float
    remove_after_s: float


class WorkersWatch(Follow[WorkerObject]):
    """Hears of writes as they happen; checks the leases every ``tick_s``.

    When a lease has run out, or nothing was heard for ``quiet_s``, everything is listed again. An API server
    that does not answer is lost; one that comes back gives every lease its whole length. An object that does
    not change for ``remove_after_s``, or for ten of its leases if that is more, is removed.
    """

    def __init__(
        self,
        api: WorkersApi,
        delivery: WatcherSinks,
        *,
        fleet: str,
        tick_s: float,
        quiet_s: float,
        remove_after_s: float,
        refusals: StoreRefusals,
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

    def lose(self, error: ClusterError) -> None:
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

    def take_event(self, event: WatchEvent) -> str:
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
        except ClusterError as error:
            if not (isinstance(error, RequestRefused) and error.status in (NOT_FOUND, CONFLICT)):
                self._on_trouble(f"worker {worker_id}", f"its old object cannot be removed: {reason(error)}")


LEASE_S = 60.0
"""A thousand workers then write 56 times a second, as the leases of 560 nodes do."""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the object of a worker that nobody renews; with long leases, after ten of them."""

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.2
"""A watcher checks more often than twice in the shortest lease that the settings allow."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in an API server from which it hears nothing."""

ANSWER_LEAST_S = 5.0
"""The least time in which the API server must answer, else the store is lost."""

SOONEST = 0.8
"""Renewals come after this part of their time at the soonest: workers that start together drift apart."""


class KubernetesDiscovery:
    """Keeps the cards of the fleet ``namespace`` as objects in the user's namespace of Kubernetes.

    A worker that starts or withdraws is heard at once, one that dies within ``lease_s`` and what it takes to
    list the objects, by the watchers' own clocks. ``lease_s`` is what this end's cards ask for; a watcher
    honours what each card asks for. ``pod`` owns what is published here: Kubernetes deletes it after the pod.
    While the API server is away, ``publish`` and ``watch`` return, and everything is made good when it is
    back. ``on_refused`` hears of objects that hold no card, once however many watch; ``on_trouble`` of cards
    that cannot be written. ``on_lost`` hears of a card published here that lost its place for ever: to a
    newer incarnation, or because somebody else withdrew it.

    Raises ConfigError for arguments out of range.
    """

    def __init__(
        self,
        user: ClusterUser,
        *,
        namespace: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        remove_after_s: float = REMOVE_AFTER_S,
        pod: OwnerPod | None = None,
    ) -> None:
        self._lease_s = checked_lease(lease_s)
        self._fleet = checked_fleet(namespace)
        self._remove_after_s = remove_after_s
        self._api = WorkersApi(user, fleet=self._fleet, answer_s=max(lease_s / 4, ANSWER_LEAST_S))
        self._on_trouble = on_trouble
        self._refusals = StoreRefusals(on_refused)
        self._cards = HeldCards(
            ObjectCards(self._api, fleet=self._fleet, pod=pod),
            lease_s=lease_s,
            on_trouble=on_trouble,
            on_lost=on_lost,
        )
        self._watches: OpenWatches[WorkersWatch] = OpenWatches()
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. A write of a replaced incarnation is ignored.

        Where the API server does not answer, the card is written as soon as it does.
        """
        if self._renewing is None:
            self._renewing = go_on(self._renew_for_ever(), name="discovery: renew leases")
        await self._cards.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where the API server does not answer, its lease runs out."""
        await self._cards.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it."""
        watch = WorkersWatch(
            self._api,
            WatcherSinks(on_card, on_gone, on_store),
            fleet=self._fleet,
            tick_s=min(self._lease_s / TICKS_PER_LEASE, TICK_MAX_S),
            quiet_s=QUIET_LEASES * self._lease_s,
            remove_after_s=self._remove_after_s,
            refusals=self._refusals,
            on_trouble=self._on_trouble,
        )
        return await self._watches.start(watch)

    async def close(self) -> None:
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for watch in self._watches.end():
            await watch.ended()
        self._cards.let_go()
        await self._api.close()

    async def _renew_for_ever(self) -> None:
        renew_s = self._lease_s / RENEWALS_PER_LEASE
        in_a_row = Failures(Backoff(RETRY_S, min(renew_s, RETRY_MAX_S)))
        wait_s = renew_s * random.uniform(SOONEST, 1.0)
        while True:
            await asyncio.sleep(wait_s)
            failures = await self._cards.renew()
            if failures:
                wait_s = wait_after(in_a_row, failures[0])
            else:
                in_a_row.reset()
                wait_s = renew_s * random.uniform(SOONEST, 1.0)
