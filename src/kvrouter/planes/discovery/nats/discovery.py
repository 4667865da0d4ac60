"""Discovery by a JetStream key-value bucket, for processes on any hosts."""

import asyncio
import time
from collections.abc import Callable

from nats.aio.client import Client

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.held import HeldCards
from kvrouter.planes.discovery.leases import RENEWALS_PER_LEASE, Delivery, TroubleSink
from kvrouter.planes.discovery.nats.bucket import Bucket
from kvrouter.planes.discovery.nats.cards import BucketCards
from kvrouter.planes.discovery.nats.watch import BucketWatch
from kvrouter.planes.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.planes.discovery.refusals import Refusals
from kvrouter.planes.discovery.wire import checked_lease, checked_namespace

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
        self._refusals = Refusals(on_refused)
        self._cards = HeldCards(
            BucketCards(self._bucket), lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost
        )
        self._watches: set[BucketWatch] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. An incarnation that was replaced is let go.

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
            Delivery(on_card, on_gone, on_store),
            lease_s=self._lease_s,
            tick_s=self._tick_s,
            quiet_s=self._lease_s * QUIET_LEASES,
            refusals=self._refusals,
        )
        self._watches.add(watch)

        def end() -> None:
            self._watches.discard(watch)
            watch.end()

        try:
            await watch.start()
        except BaseException:
            end()
            raise
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
