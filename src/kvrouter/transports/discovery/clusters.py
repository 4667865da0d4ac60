"""Discovery in several clusters at once. The cluster is one more level of topology, the broadest."""

import asyncio
from collections.abc import Callable, Mapping

from msgspec import structs

from kvrouter.core.cordon_rules import CLUSTER_LEVEL, Cordon
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.card_tracker import StoreRefusals, TroubleSink
from kvrouter.transports.discovery.port import CardSink, CordonStore, Discovery, Gone, GoneSink, StoreSink

OTHERS_WITHIN_S = 2.0
"""How long a watch that begins waits for the cards of other clusters: one that is away holds up no start."""


def placed_in(cluster: str, card: WorkerCard) -> WorkerCard:
    """Return ``card`` with ``cluster`` as the value of its broadest level, whatever it says itself."""
    config = card.runtime_config
    own = {domain: value for domain, value in config.topology_domains.items() if not _is_cluster(domain)}
    levels = [level for level in config.topology_levels if not _is_cluster(level)]
    placed = structs.replace(
        config,
        topology_domains={CLUSTER_LEVEL: cluster, **own},
        topology_levels=(CLUSTER_LEVEL, *levels),
    )
    return structs.replace(card, runtime_config=placed)


def _is_cluster(level: str) -> bool:
    return level.strip() == CLUSTER_LEVEL


class ClustersDiscovery:
    """Hands on the cards of every cluster, each with its cluster as the broadest level of its topology.

    ``clusters`` maps names to the clusters' discoveries, the own one first: cards are published there, and
    withdrawn. A worker id belongs to the cluster from which it was heard first: while that worker is there,
    the same id of another cluster is passed over, and ``on_refused`` hears of it once. One cluster's store
    may be lost: its workers stay as they were, and the others' come and go.
    """

    def __init__(self, clusters: Mapping[str, Discovery], *, on_refused: TroubleSink) -> None:
        self._clusters = dict(clusters)
        self._own = next(iter(self._clusters.values()))
        self._refusals = StoreRefusals(on_refused)

    async def publish(self, card: WorkerCard) -> None:
        """Add the card to the own cluster's, or replace it."""
        await self._own.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card from the own cluster's; idempotent."""
        await self._own.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it.

        The other clusters' cards may come later, where those do not answer soon.
        """
        watch = _Watch(on_card, on_gone, on_store, self._refusals)
        ends: list[Callable[[], None]] = []

        async def begin(name: str) -> None:
            heard = _Heard(name, watch)
            ends.append(await self._clusters[name].watch(heard.card, heard.gone, heard.store))

        own, *others = self._clusters
        beginning = [go_on(begin(name), name=f"discovery: watch cluster {name}") for name in others]

        def end() -> None:
            for task in beginning:
                task.cancel()
            for end_one in ends:
                end_one()

        try:
            await begin(own)
            if beginning:
                await asyncio.wait(beginning, timeout=OTHERS_WITHIN_S)
        except BaseException:
            end()
            raise
        return end

    async def close(self) -> None:
        """Renew nothing and watch nothing any more, in any cluster."""
        for discovery in self._clusters.values():
            await discovery.close()


class _Heard:
    """What one watcher hears from one cluster."""

    def __init__(self, cluster: str, watch: "_Watch") -> None:
        self._cluster = cluster
        self._watch = watch

    def card(self, card: WorkerCard) -> None:
        self._watch.card(self._cluster, placed_in(self._cluster, card))

    def gone(self, worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
        self._watch.gone(self._cluster, worker_id, incarnation, why)

    def store(self, is_reachable: bool, why: str) -> None:
        self._watch.store(self._cluster, is_reachable, why)


class _Watch:
    """Merges for one watcher what it hears from all clusters."""

    def __init__(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None, refusals: StoreRefusals
    ) -> None:
        self._on_card = on_card
        self._on_gone = on_gone
        self._on_store = on_store
        self._refusals = refusals
        self._cluster_of: dict[WorkerId, str] = {}
        self._passed_over: dict[WorkerId, dict[str, WorkerCard]] = {}
        self._lost: dict[str, str] = {}

    def card(self, cluster: str, card: WorkerCard) -> None:
        """Take a card, where no other cluster has its id."""
        worker_id = card.worker_id
        holder = self._cluster_of.setdefault(worker_id, cluster)
        if holder == cluster:
            self._refusals.forget(_key(cluster, worker_id))
            self._on_card(card)
            return
        self._passed_over.setdefault(worker_id, {})[cluster] = card
        self._refusals.tell(
            _key(cluster, worker_id),
            f"worker {worker_id} of cluster {cluster}",
            f"cluster {holder} has a worker of this id: start one of them with another --worker-id",
        )

    def gone(self, cluster: str, worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
        """Hand on that a worker is gone; its id is free, unless its own next start is what follows."""
        if self._cluster_of.get(worker_id, cluster) != cluster:
            self._forget(cluster, worker_id, incarnation)
            return
        self._on_gone(worker_id, incarnation, why)
        if why is not Gone.REPLACED and self._cluster_of.pop(worker_id, None) is not None:
            self._let_in(worker_id)

    def store(self, cluster: str, is_reachable: bool, why: str) -> None:
        """Report which clusters cannot be asked; it is well again once all of them can."""
        if is_reachable:
            self._lost.pop(cluster, None)
        else:
            self._lost[cluster] = why
        if self._on_store is not None:
            lost = "; ".join(f"cluster {name}: {reason}" for name, reason in self._lost.items())
            self._on_store(not lost, lost)

    def _forget(self, cluster: str, worker_id: WorkerId, incarnation: Epoch) -> None:
        cards = self._passed_over.get(worker_id, {})
        card = cards.get(cluster)
        if card is None or card.incarnation != incarnation:
            return
        del cards[cluster]
        self._refusals.forget(_key(cluster, worker_id))
        if not cards:
            del self._passed_over[worker_id]

    def _let_in(self, worker_id: WorkerId) -> None:
        """Take those that were passed over for an id that is free now: the first of them has it."""
        for cluster, card in self._passed_over.pop(worker_id, {}).items():
            self.card(cluster, card)


def _key(cluster: str, worker_id: WorkerId) -> str:
    return f"{cluster}/{worker_id}"


class ClustersCordons:
    """The cordons of every cluster. Those of the own one hold for all workers, and are what is written; those
    of another hold for its own workers alone.

    ``clusters`` maps names to the clusters' stores, the own one first. Another cluster that cannot be read
    keeps what was read last, and ``on_refused`` hears of it, once until it can be read.
    """

    def __init__(self, clusters: Mapping[str, CordonStore], *, on_refused: TroubleSink) -> None:
        own, *others = clusters
        self._own = clusters[own]
        self._others = {name: clusters[name] for name in others}
        self._last: dict[str, tuple[Cordon, ...]] = {}
        self._refusals = StoreRefusals(on_refused)
        self._silent: set[str] = set()
        """Those that did not answer in time; they are waited for again once they have."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """What other clusters are being asked: one that does not answer holds up nobody."""
        self.look_s = max(store.look_s for store in clusters.values())

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; raise CordonsUnavailable where the own cluster's cannot be read. Another
        cluster that takes longer is taken as it was read last, at most ``OTHERS_WITHIN_S`` after it is asked.
        """
        for name in self._others:
            if name not in self._asking or self._asking[name].done():
                self._silent.discard(name)
                self._asking[name] = go_on(self._read_other(name), name=f"cordons: read cluster {name}")
        began_s = asyncio.get_running_loop().time()
        own = await self._own.read()
        fresh = [self._asking[name] for name in self._others if name not in self._silent]
        if fresh:
            left_s = began_s + OTHERS_WITHIN_S - asyncio.get_running_loop().time()
            await asyncio.wait(fresh, timeout=max(0.0, left_s))
        self._silent = {name for name, task in self._asking.items() if not task.done()}
        return (*own, *(cordon for cordons in self._last.values() for cordon in cordons))

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon in the own cluster."""
        await self._own.put(cordon)

    async def remove(self, cordon: Cordon) -> None:
        """Remove a cordon from the own cluster."""
        await self._own.remove(cordon)

    async def _read_other(self, name: str) -> None:
        try:
            found = await self._others[name].read()
        except CordonsUnavailable as error:
            self._refusals.tell(name, f"cluster {name}", error.message)
            return
        self._refusals.forget(name)
        self._last[name] = tuple(structs.replace(cordon, cluster=name) for cordon in found)
