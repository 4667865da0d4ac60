"""Discovery by a JetStream key-value bucket, for processes on any hosts."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nats.aio.client import Client

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.leases import (
    RENEWALS_PER_LEASE,
    Delivery,
    TroubleSink,
    claim,
    lost_why,
    still_claims,
)
from kvrouter.planes.discovery.nats.bucket import STORE_ERRORS, Bucket, OtherWrote
from kvrouter.planes.discovery.nats.watch import BucketWatch, Refusals
from kvrouter.planes.discovery.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.planes.discovery.wire import (
    RECORD_MAX_BYTES,
    CardRecord,
    checked_lease,
    checked_namespace,
    encode_record,
)
from kvrouter.planes.nats_reasons import reason

LEASE_S = 10.0
TICKS_PER_LEASE = 20
TICK_MAX_S = 0.5
"""How soon this end notices that the connection is there again."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in a store from which it hears nothing."""

ANSWER_LEAST_S = 2.0
"""The least time in which NATS must answer, else the store is lost."""

WRITES_AT_ONCE = 64
WRITE_TRIES = 4
"""How often a write is tried again because somebody else wrote meanwhile."""


@dataclass(slots=True)
class _Held:
    """A card that this process keeps alive. ``revision`` is what stands in the bucket, as far as it knows."""

    record: CardRecord
    revision: int
    was_written: bool = False
    """So was the card that this one updates."""
    is_written: bool = False
    is_over: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class NatsDiscovery:
    """Keeps the cards of ``namespace`` in a bucket of its own, which is made where it is missing.

    A worker that starts or withdraws is heard at once, one that dies within ``lease_s`` and what it takes to
    ask the store, by the watchers' own clocks. ``lease_s`` is what this end's cards ask for; a watcher
    honours what each card asks for. ``replicas`` is how many servers keep the bucket. While NATS is away,
    ``publish`` and ``watch`` return, and everything is made good when it is back. ``on_refused`` hears of
    keys that hold no card sealed with ``token``, once however many watch; ``on_trouble`` of cards that cannot
    be written. ``on_lost`` hears of a card published here that lost its place for ever: to a newer
    incarnation, or because somebody else withdrew it.

    Raises ConfigError for arguments out of range. The connection stays its maker's, who closes it.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        replicas: int = 1,
    ) -> None:
        if not 1 <= replicas <= 5:
            raise ConfigError(f"replicas: 1 to 5, not {replicas}", param="replicas")
        self._lease_s = checked_lease(lease_s)
        self._tick_s = min(lease_s / TICKS_PER_LEASE, TICK_MAX_S)
        self._client = client
        self._bucket = Bucket(
            client,
            namespace=checked_namespace(namespace),
            token=token,
            ttl_s=lease_s,
            replicas=replicas,
            answer_s=max(lease_s / 2, ANSWER_LEAST_S),
        )
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._refusals = Refusals(on_refused)
        self._held: dict[WorkerId, _Held] = {}
        self._is_failing = False
        self._watches: set[BucketWatch] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. An incarnation that was replaced is let go.

        Where NATS does not answer, the card is written as soon as it does.
        """
        known = self._held.get(card.worker_id)
        record = claim(card, self._lease_s, None if known is None else known.record)
        if record is None:
            return
        held = _checked(_Held(record, 0 if known is None else known.revision))
        if known is not None:
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
        """Mark the card as withdrawn; where NATS does not answer, its lease runs out."""
        held = self._held.get(worker_id)
        if held is not None and held.record.card.incarnation == incarnation:
            held.is_over = True
            del self._held[worker_id]
        try:
            await self._mark_withdrawn(worker_id, incarnation)
        except (*STORE_ERRORS, OtherWrote, ProtocolError) as error:
            self._on_trouble(f"worker {worker_id}", f"not withdrawn: {reason(error)}")

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it.

        Where NATS does not answer, ``on_store`` hears that it is lost, and everything else when it is back.
        """
        watch = BucketWatch(
            self._bucket,
            Delivery(on_card, on_gone, on_store),
            lease_s=self._lease_s,
            tick_s=self._tick_s,
            quiet_s=self._lease_s * QUIET_LEASES,
            refusals=self._refusals,
        )
        self._watches.add(watch)
        await watch.start()

        def end() -> None:
            self._watches.discard(watch)
            watch.end()

        return end

    async def close(self) -> None:
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        self._is_closed = True
        watches, self._watches = self._watches, set()
        for watch in watches:
            watch.end()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for watch in watches:
            await watch.ended()
        self._held.clear()

    # Renewal

    async def _renew_for_ever(self) -> None:
        due_at, reconnects = time.monotonic() + self._lease_s / RENEWALS_PER_LEASE, self._reconnects()
        # The client may lose a cancellation that comes together with an answer: hence the flag.
        while not self._is_closed:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            if now < due_at and reconnects == self._reconnects():
                continue
            reconnects = self._reconnects()
            due_at = now + self._lease_s / RENEWALS_PER_LEASE
            if not await self._renew_all():
                due_at = time.monotonic() + self._tick_s

    def _reconnects(self) -> int:
        return self._client.stats["reconnects"]

    async def _renew_all(self) -> bool:
        """Renew every card; return whether all that could be done was done."""
        all_held = tuple(self._held.values())
        outcomes: list[Exception | None] = []
        for first in range(0, len(all_held), WRITES_AT_ONCE):
            some = all_held[first : first + WRITES_AT_ONCE]
            outcomes += await asyncio.gather(*(self._write(held) for held in some))
        self._note(outcomes)
        return not any(outcomes)

    async def _write(self, held: _Held) -> Exception | None:
        """Write the card; return what went wrong. A card that lost its place is not held any more."""
        async with held.writing:
            try:
                if not self._client.is_connected:
                    raise ConnectionError("not connected to NATS")
                lost = await self._write_over(held)
            except (*STORE_ERRORS, OtherWrote, ProtocolError) as error:
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
        for _ in range(WRITE_TRIES):
            if held.is_over:
                return None
            try:
                held.revision = await self._bucket.write(held.record, held.revision)
            except OtherWrote:
                current, held.revision = await self._current(held.record.card.worker_id)
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
        raise OtherWrote(f"somebody else writes the card of worker {held.record.card.worker_id} all the time")

    async def _mark_withdrawn(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        if not self._client.is_connected:
            raise ConnectionError("not connected to NATS")
        for _ in range(WRITE_TRIES):
            current, revision = await self._current(worker_id)
            if current is None or current.card.incarnation != incarnation or current.withdrawn:
                return
            gone = CardRecord(current.card, current.lease_s, current.replaced, withdrawn=True)
            try:
                await self._bucket.write(gone, revision)
            except OtherWrote:
                continue
            return
        raise OtherWrote(f"somebody else writes the card of worker {worker_id} all the time")

    async def _current(self, worker_id: WorkerId) -> tuple[CardRecord | None, int]:
        """What is there, and its revision. A value that is no record is as good as none: the key is ours."""
        kept = await self._bucket.read(str(worker_id))
        if kept.value is None:
            return None, kept.revision
        try:
            return self._bucket.opened(str(worker_id), kept.value)[1], kept.revision
        except ProtocolError:
            return None, kept.revision

    def _note(self, outcomes: list[Exception | None]) -> None:
        """Tell once that cards cannot be written, until they all can."""
        failures = [failure for failure in outcomes if failure is not None]
        if failures and not self._is_failing:
            self._on_trouble(f"cards of {len(failures)} workers", f"not written: {reason(failures[0])}")
        self._is_failing = bool(failures)


def _checked(held: _Held) -> _Held:
    size_bytes = len(encode_record(held.record))
    if size_bytes > RECORD_MAX_BYTES:
        raise ConfigError(f"the card has {size_bytes} bytes, more than {RECORD_MAX_BYTES}", param="card")
    return held
