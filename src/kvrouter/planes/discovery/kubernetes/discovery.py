"""Discovery by objects of a Kubernetes API server, for processes in pods of one namespace."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.kubernetes.account import Account
from kvrouter.planes.discovery.kubernetes.api import WorkersApi, reason
from kvrouter.planes.discovery.kubernetes.backoff import Backoff
from kvrouter.planes.discovery.kubernetes.objects import (
    Pod,
    WorkerObject,
    checked_fleet,
    encode_object,
    record_of,
)
from kvrouter.planes.discovery.kubernetes.server import STORE_ERRORS, ApiError
from kvrouter.planes.discovery.kubernetes.watch import Refusals, WorkersWatch
from kvrouter.planes.discovery.leases import (
    RENEWALS_PER_LEASE,
    Delivery,
    TroubleSink,
    claim,
    lost_why,
    still_claims,
)
from kvrouter.planes.discovery.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.planes.discovery.wire import (
    RECORD_MAX_BYTES,
    CardRecord,
    checked_lease,
    encode_record,
)

LEASE_S = 60.0
"""A thousand workers then write 56 times a second, as the leases of 560 nodes do."""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the object of a worker that nobody renews; with long leases, after ten of them."""

TICKS_PER_LEASE = 20
TICK_MAX_S = 0.2
"""A watcher looks more often than twice in the shortest lease that the settings allow."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in an API server from which it hears nothing."""

ANSWER_LEAST_S = 5.0
"""The least time in which the API server must answer, else the store is lost."""

WRITE_TRIES = 4
"""How often a write is tried again because somebody else wrote meanwhile."""

SOONEST = 0.8
"""Renewals come after this part of their time at the soonest: workers that start together drift apart."""


class OtherWrote(Exception):
    """Somebody else writes the object all the time."""


@dataclass(slots=True)
class _Held:
    """A card that this process keeps alive. ``version`` is what stands in the store, as far as it knows."""

    record: CardRecord
    version: str | None = None
    renewals: int = 0
    was_written: bool = False
    """So was the card that this one updates."""

    is_written: bool = False
    is_over: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class KubernetesDiscovery:
    """Keeps the cards of the fleet ``namespace`` as objects in the account's namespace of Kubernetes.

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
        account: Account,
        *,
        namespace: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        remove_after_s: float = REMOVE_AFTER_S,
        pod: Pod | None = None,
    ) -> None:
        self._lease_s = checked_lease(lease_s)
        self._fleet = checked_fleet(namespace)
        self._remove_after_s = remove_after_s
        self._owners = () if pod is None else (pod.reference(),)
        self._api = WorkersApi(account, fleet=self._fleet, answer_s=max(lease_s / 4, ANSWER_LEAST_S))
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._refusals = Refusals(on_refused)
        self._held: dict[WorkerId, _Held] = {}
        self._is_failing = False
        self._watches: set[WorkersWatch] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. An incarnation that was replaced is let go.

        Where the API server does not answer, the card is written as soon as it does.
        """
        known = self._held.get(card.worker_id)
        record = claim(card, self._lease_s, None if known is None else known.record)
        if record is None:
            return
        held = _Held(_checked(record))
        if known is not None:
            held.version, held.renewals = known.version, known.renewals
            is_update = known.record.card.incarnation == card.incarnation
            held.was_written = is_update and (known.is_written or known.was_written)
            known.is_over = True
        self._held[card.worker_id] = held
        if self._renewing is None:
            self._renewing = go_on(self._renew_for_ever(), name="discovery: renew leases")
        failure = await self._write(held)
        if failure is not None and known is None:
            self._is_failing = True
            self._on_trouble(f"worker {card.worker_id}", f"not announced yet: {reason(failure)}")
        else:
            self._note([failure])

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where the API server does not answer, its lease runs out."""
        held = self._held.get(worker_id)
        if held is not None and held.record.card.incarnation == incarnation:
            held.is_over = True
            del self._held[worker_id]
        try:
            await self._mark_withdrawn(worker_id, incarnation)
        except (*STORE_ERRORS, OtherWrote) as error:
            self._on_trouble(f"worker {worker_id}", f"not withdrawn: {reason(error)}")

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it."""
        watch = WorkersWatch(
            self._api,
            Delivery(on_card, on_gone, on_store),
            fleet=self._fleet,
            tick_s=min(self._lease_s / TICKS_PER_LEASE, TICK_MAX_S),
            quiet_s=QUIET_LEASES * self._lease_s,
            remove_after_s=self._remove_after_s,
            refusals=self._refusals,
            on_trouble=self._on_trouble,
        )
        self._watches.add(watch)
        await watch.start()

        def end() -> None:
            self._watches.discard(watch)
            watch.end()

        return end

    async def close(self) -> None:
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        watches, self._watches = self._watches, set()
        for watch in watches:
            watch.end()
        for watch in watches:
            await watch.ended()
        self._held.clear()
        await self._api.close()

    async def _renew_for_ever(self) -> None:
        renew_s = self._lease_s / RENEWALS_PER_LEASE
        backoff = Backoff(most_s=min(renew_s, Backoff().most_s))
        wait_s = renew_s * random.uniform(SOONEST, 1.0)
        while True:
            await asyncio.sleep(wait_s)
            failures = await self._renew_all()
            if failures:
                wait_s = backoff.after(failures[0])
            else:
                backoff.reset()
                wait_s = renew_s * random.uniform(SOONEST, 1.0)

    async def _renew_all(self) -> list[Exception]:
        """Renew every card; return what went wrong."""
        outcomes = await asyncio.gather(*map(self._write, tuple(self._held.values())))
        return self._note(outcomes)

    async def _write(self, held: _Held) -> Exception | None:
        """Write the card; return what went wrong. A card that lost its place is not held any more."""
        async with held.writing:
            try:
                lost = await self._write_over(held)
            except (*STORE_ERRORS, OtherWrote) as error:
                return error
        worker_id = held.record.card.worker_id
        if lost is not None and self._held.get(worker_id) is held:
            del self._held[worker_id]
            if held.is_written or held.was_written:
                self._on_trouble(f"worker {worker_id}", lost_why(lost))
                if self._on_lost is not None:
                    self._on_lost(worker_id, held.record.card.incarnation, lost)
        return None

    async def _write_over(self, held: _Held) -> Gone | None:
        """Write over what is there; return how the card lost its place, None if it has it."""
        worker_id = held.record.card.worker_id
        for _ in range(WRITE_TRIES):
            if held.is_over:
                return None
            held.renewals += 1
            try:
                held.version = await self._put(held.record, held.version, held.renewals)
            except ApiError as error:
                if not _is_other(error, held.version):
                    raise
                current, held.version = await self._current(worker_id)
                mine = held.record
                record = (
                    still_claims(mine, current)
                    if held.is_written
                    else claim(mine.card, mine.lease_s, current, mine) or Gone.REPLACED
                )
                if isinstance(record, Gone):
                    return record
                held.record = record
            else:
                held.is_written = True
                return None
        raise OtherWrote(f"somebody else writes the card of worker {worker_id} all the time")

    async def _mark_withdrawn(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        for _ in range(WRITE_TRIES):
            found = await self._api.read(worker_id)
            current = None if found is None else self._record_of(found)
            if found is None or current is None:
                return
            if current.card.incarnation != incarnation or current.withdrawn:
                return
            version = found.metadata.resource_version
            body = encode_object(
                CardRecord(current.card, current.lease_s, current.replaced, withdrawn=True),
                fleet=self._fleet,
                replaces=version,
                owners=found.metadata.owner_references,
            )
            try:
                await self._api.replace(worker_id, body)
            except ApiError as error:
                if not _is_other(error, version):
                    raise
            else:
                return
        raise OtherWrote(f"somebody else writes the card of worker {worker_id} all the time")

    async def _put(self, record: CardRecord, version: str | None, renewals: int) -> str:
        """Write over ``version``, or where none is; return the version that it has now."""
        body = encode_object(
            record, fleet=self._fleet, renewals=renewals, replaces=version, owners=self._owners
        )
        if version is None:
            written = await self._api.create(body)
        else:
            written = await self._api.replace(record.card.worker_id, body)
        return written.metadata.resource_version

    async def _current(self, worker_id: WorkerId) -> tuple[CardRecord | None, str | None]:
        """What is there, and its version. One that is no record is as good as none: its name is ours."""
        found = await self._api.read(worker_id)
        if found is None:
            return None, None
        return self._record_of(found), found.metadata.resource_version

    def _record_of(self, found: WorkerObject) -> CardRecord | None:
        try:
            return record_of(found, fleet=self._fleet)
        except ProtocolError:
            return None

    def _note(self, outcomes: list[Exception | None]) -> list[Exception]:
        """Tell once that cards cannot be written, until they all can; return what went wrong."""
        failures = [failure for failure in outcomes if failure is not None]
        if failures and not self._is_failing:
            self._on_trouble(f"cards of {len(failures)} workers", f"not written: {reason(failures[0])}")
        self._is_failing = bool(failures)
        return failures


def _is_other(error: ApiError, version: str | None) -> bool:
    """Whether something else stands there than was to be written over."""
    return error.code == 409 or (error.code == 404 and version is not None)


def _checked(record: CardRecord) -> CardRecord:
    size_bytes = len(encode_record(record))
    if size_bytes > RECORD_MAX_BYTES:
        raise ConfigError(f"the card has {size_bytes} bytes, more than {RECORD_MAX_BYTES}", param="card")
    return record
