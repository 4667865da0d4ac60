"""Discovery by a JetStream key-value bucket."""

import asyncio
import datetime
import time
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.subscription import Subscription

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
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
from kvrouter.transports.discovery.nats.bucket import STORE_ERRORS, Bucket, BucketCards
from kvrouter.transports.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.transports.discovery.wire import checked_lease, checked_namespace
from kvrouter.transports.nats_client import reason

READS_AT_ONCE = 128
"""How many keys are asked for at a time."""

WORKERS_MAX = 16_384
"""How many workers one watcher follows; those beyond are reported, and not followed."""

REMEMBERED_LEASES = 10
"""For how many leases a worker that is over is remembered. Its key is gone after one."""


class BucketWatch:
    """Hears of writes as they happen; checks the leases every ``tick_s``.

    When a lease has run out, or nothing was heard for ``quiet_s``, the store is asked. One that does not
    answer, or takes no writes while a lease has run out, is lost; one that comes back, or is another than
    before, gives every lease its whole length.
    """

    def __init__(
        self,
        bucket: Bucket,
        delivery: WatcherSinks,
        *,
        lease_s: float,
        tick_s: float,
        quiet_s: float,
        refusals: StoreRefusals,
    ) -> None:
        self._bucket = bucket
        self._delivery = delivery
        self._lease_s = lease_s
        self._tick_s = tick_s
        self._quiet_s = quiet_s
        self._refusals = refusals
        self._leases = CardLeases()
        self._made_at: datetime.datetime | None = None
        self._numbers: dict[WorkerId, int] = {}
        self._reconnects: int | None = None
        self._heard_at = 0.0
        self._has_ended = False
        self._listening: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Deliver what is there and go on watching; report a store that does not answer, and wait for it."""
        try:
            await self._check_leases()
        except BaseException:
            await self._hear_no_more()
            raise
        self._task = go_on(self._run(), name="discovery: watch a bucket")
        await asyncio.sleep(0)

    def end(self) -> None:
        """Watch no more; idempotent."""
        self._has_ended = True
        self._delivery.end()
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            # The client may lose a cancellation that comes together with an answer: hence the flag.
            while not self._has_ended:
                await asyncio.sleep(self._tick_s)
                await self._check_leases()
        finally:
            await self._hear_no_more()

    async def _hear_no_more(self) -> None:
        if self._listening is None:
            return
        try:
            await self._listening.unsubscribe()
        except STORE_ERRORS:
            # A connection that is closed has unsubscribed already.
            self._listening = None

    async def _check_leases(self) -> None:
        """Check the leases, and ask the store where they alone do not decide."""
        now = time.monotonic()
        self._leases.look(now)
        try:
            await self._ask(now)
        except (*STORE_ERRORS, ProtocolError) as error:
            if not self._leases.is_lost:
                self._leases.lose()
                self._delivery.store(False, reason(error))
        self._leases.forget_before(now - REMEMBERED_LEASES * self._lease_s)
        if len(self._numbers) > 2 * len(self._leases) + 64:
            self._numbers = {each: at for each, at in self._numbers.items() if each in self._leases}

    async def _ask(self, now: float) -> None:
        client = self._bucket.client
        if not client.is_connected:
            raise ConnectionError("not connected to NATS")
        reconnects = client.stats["reconnects"]
        if self._leases.is_lost or reconnects != self._reconnects:
            made_at = await self._bucket.identify()
            if self._leases.is_lost:
                await self._bucket.check_writes()
            await self._restart(made_at)
            self._reconnects = reconnects
            return
        overdue = self._leases.overdue(now)
        if not overdue and now - self._heard_at <= self._quiet_s:
            return
        await self._read([str(worker_id) for worker_id in overdue])
        made_at = await self._bucket.identify()
        if made_at != self._made_at:
            await self._restart(made_at)
            return
        if self._leases.overdue(now):
            await self._bucket.check_writes()  # else nobody could have renewed
        self._heard_at = time.monotonic()
        self._delivery.changes(self._leases.expire(now))

    async def _restart(self, made_at: datetime.datetime) -> None:
        """Read everything, and give every lease its whole length."""
        if made_at != self._made_at:
            self._numbers.clear()
            self._made_at = made_at
        was_lost = self._leases.is_lost
        self._leases.regain(time.monotonic())
        if was_lost:
            self._delivery.store(True, "")
        if self._listening is None:
            self._listening = await self._bucket.listen(self._take)
        await self._read(await self._bucket.keys())
        self._heard_at = time.monotonic()

    async def _read(self, keys: list[str]) -> None:
        """Take what the bucket keeps under each of these keys."""
        for first in range(0, len(keys), READS_AT_ONCE):
            some = keys[first : first + READS_AT_ONCE]
            for key, kept in zip(some, await asyncio.gather(*map(self._bucket.read, some)), strict=True):
                if kept.revision:
                    self._take(key, kept.value, kept.revision)

    def _take(self, key: str, value: bytes | None, revision: int) -> None:
        """Take what was written; what is older than what is known is no news.

        A key that was deleted is none either: anybody can delete. Its worker's next renewal writes it again,
        or its lease runs out.
        """
        if value is None:
            return
        try:
            self._take_checked(key, value, revision)
        except ProtocolError as error:
            what = f"key {key[:80]} of bucket {self._bucket.name}"
            self._refusals.tell(key, what, error.message, version=revision)

    def _take_checked(self, key: str, value: bytes, revision: int) -> None:
        number, record = self._bucket.opened(key, value)
        self._heard_at = time.monotonic()
        if not (key.isascii() and key.isdecimal()):
            raise ProtocolError("no worker id", param="worker_id")
        worker_id = WorkerId(int(key))
        if worker_id not in self._leases:
            self._numbers.pop(worker_id, None)
            if len(self._leases) >= WORKERS_MAX:
                raise ProtocolError(f"more than {WORKERS_MAX} workers", param="worker_id")
        known = self._numbers.get(worker_id, -1)
        if number <= known:
            if number < known:
                # Late, or said again, or from a bucket that was made again: the next check asks which it is.
                self._heard_at = 0.0
            return
        if record.card.worker_id != worker_id:
            raise ProtocolError(f"holds the card of worker {record.card.worker_id}", param="worker_id")
        changes = self._leases.hear(record, number, time.monotonic())
        self._numbers[worker_id] = number
        self._refusals.forget(key, version=revision)
        self._delivery.changes(changes)


LEASE_S = 10.0
TICKS_PER_LEASE = 20
TICK_MAX_S = 0.5
"""How soon this end notices that the connection is there again."""

QUIET_LEASES = 0.5
"""For how much of a lease a watcher believes in a store from which it hears nothing."""

ANSWER_LEAST_S = 2.0
"""The least time in which NATS must answer, else the store is lost."""


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
        self._refusals = StoreRefusals(on_refused)
        self._cards = HeldCards(
            BucketCards(self._bucket), lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost
        )
        self._watches: OpenWatches[BucketWatch] = OpenWatches()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. A write of a replaced incarnation is ignored.

        Where NATS does not answer, the card is written as soon as it does.
        """
        if self._renewing is None:
            self._renewing = go_on(self._renew_for_ever(), name="discovery: renew leases")
        await self._cards.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where NATS does not answer, its lease runs out."""
        await self._cards.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it.

        Where NATS does not answer, ``on_store`` hears that it is lost, and everything else when it is back.
        """
        watch = BucketWatch(
            self._bucket,
            WatcherSinks(on_card, on_gone, on_store),
            lease_s=self._lease_s,
            tick_s=self._tick_s,
            quiet_s=self._lease_s * QUIET_LEASES,
            refusals=self._refusals,
        )
        return await self._watches.start(watch)

    async def close(self) -> None:
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        self._is_closed = True
        watches = self._watches.end()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        for watch in watches:
            await watch.ended()
        self._cards.let_go()

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
            if await self._cards.renew():
                due_at = time.monotonic() + self._tick_s

    def _reconnects(self) -> int:
        return self._client.stats["reconnects"]
