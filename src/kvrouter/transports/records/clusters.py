"""Discovery and cordons of several clusters. The cluster is the broadest level of topology."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from kvrouter.core.cordon_rules import CLUSTER_LEVEL, Cordon
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.background import spawn
from kvrouter.transports.records.card_tracker import StoreRefusals, TroubleSink
from kvrouter.transports.records.port import CardSink, CordonStore, Discovery, Gone, GoneSink, StoreSink

OTHERS_WITHIN_S = 2.0
"""How long a starting watch waits for the cards of other clusters, so that a lost one delays no start."""


def placed_in(cluster: str, card: WorkerCard) -> WorkerCard:
    """Return ``card`` with :data:`CLUSTER_LEVEL` as its broadest level, set to ``cluster``."""
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
    """Delivers the cards of every cluster, each with its cluster as the broadest level of its topology.

    ``clusters`` maps names to the clusters' discoveries, the own one first: cards are published to and
    withdrawn from the own one. A worker id belongs to the cluster that reported it first: while that worker
    is there, the same id of another cluster is ignored, and ``on_refused`` is called once. When one cluster's
    store is lost, its workers stay as they were, and the other clusters continue.
    """

    def __init__(self, clusters: Mapping[str, Discovery], *, on_refused: TroubleSink) -> None:
        self._clusters = dict(clusters)
        self._own = next(iter(self._clusters.values()))
        self.propagation_s = self._own.propagation_s
        self._refusals = StoreRefusals(on_refused)

    async def publish(self, card: WorkerCard) -> None:
        """Add or replace the card in the own cluster."""
        await self._own.publish(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Remove the card from the own cluster; idempotent."""
        await self._own.withdraw(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends the watch.

        Cards of other clusters may come later, where these do not answer soon.
        """
        watch = _Watch(on_card, on_gone, on_store, self._refusals)
        ends: list[Callable[[], None]] = []

        async def begin(name: str) -> None:
            on_card, on_gone = partial(watch.card, name), partial(watch.gone, name)
            ends.append(await self._clusters[name].watch(on_card, on_gone, partial(watch.store, name)))

        own, *others = self._clusters
        beginning = [spawn(begin(name), name=f"discovery: watch cluster {name}") for name in others]

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
        """Stop renewing and watching, in all clusters."""
        for discovery in self._clusters.values():
            await discovery.close()


class _Watch:
    """Merges the changes of all clusters for one watcher."""

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
        """Deliver a card, unless another cluster has its id."""
        worker_id = card.worker_id
        holder = self._cluster_of.setdefault(worker_id, cluster)
        if holder == cluster:
            self._refusals.forget(_key(cluster, worker_id))
            self._on_card(placed_in(cluster, card))
            return
        self._passed_over.setdefault(worker_id, {})[cluster] = card
        self._refusals.report(
            _key(cluster, worker_id),
            f"worker {worker_id} of cluster {cluster}",
            f"cluster {holder} has a worker of this id: start one of them with another --worker-id",
        )

    def gone(self, cluster: str, worker_id: WorkerId, incarnation: Epoch, why: Gone) -> None:
        """Deliver that a worker is gone; free its id, unless a newer incarnation replaced it."""
        if self._cluster_of.get(worker_id, cluster) != cluster:
            self._forget(cluster, worker_id, incarnation)
            return
        self._on_gone(worker_id, incarnation, why)
        if why is not Gone.REPLACED and self._cluster_of.pop(worker_id, None) is not None:
            self._let_in(worker_id)

    def store(self, cluster: str, is_reachable: bool, why: str) -> None:
        """Report which clusters cannot be reached; the store is back once all of them can."""
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
        """Deliver the ignored cards of an id that is free now: the first of them gets it."""
        for cluster, card in self._passed_over.pop(worker_id, {}).items():
            self.card(cluster, card)


def _key(cluster: str, worker_id: WorkerId) -> str:
    return f"{cluster}/{worker_id}"


class ClustersCordons:
    """The cordons of all clusters. Only the own cluster's are written, and they apply to all workers; another
    cluster's apply to its own workers.

    ``clusters`` maps names to stores, the own one first. While another cluster cannot be read, its last read
    cordons stay, and ``on_refused`` is called once per outage.
    """

    def __init__(self, clusters: Mapping[str, CordonStore], *, on_refused: TroubleSink) -> None:
        own, *others = clusters
        self._own = clusters[own]
        self._others = {name: clusters[name] for name in others}
        self._last: dict[str, tuple[Cordon, ...]] = {}
        self._refusals = StoreRefusals(on_refused)
        self._silent: set[str] = set()
        """Clusters that did not answer in time; reads wait for them again after their next answer."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """Running reads by cluster, so that a slow cluster delays no other."""
        self.poll_s = max(store.poll_s for store in clusters.values())

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; raise CordonsUnavailable where the own cluster's cannot be read. A slower
        cluster contributes its last read, at most ``OTHERS_WITHIN_S`` after the read began.
        """
        for name in self._others:
            if name not in self._asking or self._asking[name].done():
                self._silent.discard(name)
                self._asking[name] = spawn(self._read_other(name), name=f"cordons: read cluster {name}")
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
            self._refusals.report(name, f"cluster {name}", error.message)
            return
        self._refusals.forget(name)
        self._last[name] = tuple(structs.replace(cordon, cluster=name) for cordon in found)
