"""Discovery by objects of a Kubernetes API server, for processes in pods of one namespace."""

import asyncio
import random
from collections.abc import Callable

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.held import HeldCards
from kvrouter.planes.discovery.kubernetes.account import Account
from kvrouter.planes.discovery.kubernetes.api import WorkersApi
from kvrouter.planes.discovery.kubernetes.backoff import Backoff
from kvrouter.planes.discovery.kubernetes.cards import ObjectCards
from kvrouter.planes.discovery.kubernetes.objects import Pod, checked_fleet
from kvrouter.planes.discovery.kubernetes.watch import WorkersWatch
from kvrouter.planes.discovery.leases import RENEWALS_PER_LEASE, Delivery, TroubleSink
from kvrouter.planes.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.planes.discovery.refusals import Refusals
from kvrouter.planes.discovery.wire import checked_lease

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

SOONEST = 0.8
"""Renewals come after this part of their time at the soonest: workers that start together drift apart."""


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
        self._api = WorkersApi(account, fleet=self._fleet, answer_s=max(lease_s / 4, ANSWER_LEAST_S))
        self._on_trouble = on_trouble
        self._refusals = Refusals(on_refused)
        self._cards = HeldCards(
            ObjectCards(self._api, fleet=self._fleet, pod=pod),
            lease_s=lease_s,
            on_trouble=on_trouble,
            on_lost=on_lost,
        )
        self._watches: set[WorkersWatch] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. An incarnation that was replaced is let go.

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
            Delivery(on_card, on_gone, on_store),
            fleet=self._fleet,
            tick_s=min(self._lease_s / TICKS_PER_LEASE, TICK_MAX_S),
            quiet_s=QUIET_LEASES * self._lease_s,
            remove_after_s=self._remove_after_s,
            refusals=self._refusals,
            on_trouble=self._on_trouble,
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
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        watches, self._watches = self._watches, set()
        for watch in watches:
            watch.end()
        for watch in watches:
            await watch.ended()
        self._cards.let_go()
        await self._api.close()

    async def _renew_for_ever(self) -> None:
        renew_s = self._lease_s / RENEWALS_PER_LEASE
        backoff = Backoff(most_s=min(renew_s, Backoff().most_s))
        wait_s = renew_s * random.uniform(SOONEST, 1.0)
        while True:
            await asyncio.sleep(wait_s)
            failures = await self._cards.renew()
            if failures:
                wait_s = backoff.after(failures[0])
            else:
                backoff.reset()
                wait_s = renew_s * random.uniform(SOONEST, 1.0)
