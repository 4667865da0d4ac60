"""One watcher of a bucket: hears what is written, and asks before it believes that a lease ran out."""

import asyncio
import datetime
import time

from nats.aio.subscription import Subscription

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.leases import CardLeases, Delivery
from kvrouter.planes.discovery.nats.bucket import STORE_ERRORS, Bucket
from kvrouter.planes.discovery.refusals import Refusals
from kvrouter.planes.nats_reasons import reason

READS_AT_ONCE = 128
"""How many keys are asked for at a time."""

WORKERS_MAX = 16_384
"""How many workers one watcher follows; those beyond are told, and let go."""

REMEMBERED_LEASES = 10
"""For how many leases a worker that is over is remembered. Its key is gone after one."""


class BucketWatch:
    """Hears of writes as they happen; looks at the leases every ``tick_s``.

    When a lease has run out, or nothing was heard for ``quiet_s``, the store is asked. One that does not
    answer, or takes no writes while a lease has run out, is lost; one that comes back, or is another than
    before, gives every lease its whole length.
    """

    def __init__(
        self,
        bucket: Bucket,
        delivery: Delivery,
        *,
        lease_s: float,
        tick_s: float,
        quiet_s: float,
        refusals: Refusals,
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
        """Deliver what is there, and go on watching; a store that does not answer is told, and waited for."""
        try:
            await self._look()
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
                await self._look()
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

    async def _look(self) -> None:
        """Look at the leases, and ask the store where they alone do not tell."""
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
            await self._begin_anew(made_at)
            self._reconnects = reconnects
            return
        overdue = self._leases.overdue(now)
        if not overdue and now - self._heard_at <= self._quiet_s:
            return
        await self._read([str(worker_id) for worker_id in overdue])
        made_at = await self._bucket.identify()
        if made_at != self._made_at:
            await self._begin_anew(made_at)
            return
        if self._leases.overdue(now):
            await self._bucket.check_writes()  # else nobody could have renewed
        self._heard_at = time.monotonic()
        self._delivery.changes(self._leases.expire(now))

    async def _begin_anew(self, made_at: datetime.datetime) -> None:
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
                # Late, or said again, or from a bucket that was made again: the next look asks which it is.
                self._heard_at = 0.0
            return
        if record.card.worker_id != worker_id:
            raise ProtocolError(f"holds the card of worker {record.card.worker_id}", param="worker_id")
        changes = self._leases.hear(record, number, time.monotonic())
        self._numbers[worker_id] = number
        self._refusals.forget(key, version=revision)
        self._delivery.changes(changes)
