"""The controller: watches, and queues each deployment whose objects, pods or nodes changed."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from kvrouter.config.planes import DiscoveryBackend
from kvrouter.core.backoff import Backoff, Failures
from kvrouter.core.cordons import Cordon
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, ClusterError, ClusterLost, KubeClient, RequestRefused
from kvrouter.kube.informer import RETRY_MAX_S, RETRY_S, Informer, wait_after
from kvrouter.kube.objects import (
    CORDONS,
    FLEET_LABEL,
    WORKERS,
    Key,
    Manifest,
    ResourceKind,
    key_of,
    metadata_of,
    uid_of,
)
from kvrouter.operator.api import read_topology
from kvrouter.operator.api.deployment import DEFAULT_CLASS, class_of
from kvrouter.operator.cluster_info import (
    DEPLOYMENTS_OF_GRAPHS,
    NODES,
    PODS,
    TOPOLOGIES,
    ClusterFacts,
    Grove,
    by_name,
)
from kvrouter.operator.labels import gather_s, read_node
from kvrouter.operator.plan import DEPLOYMENT_LABEL, MANAGER, PlanDefaults, fleet_name, node_cordon
from kvrouter.operator.reconcile.apply import OWNED, Applier, owner_uid_of
from kvrouter.operator.reconcile.bindings import POLICIES, Bindings, is_known, wanted_by
from kvrouter.operator.reconcile.cards import EXPIRE_S, Cards, fleet_of
from kvrouter.operator.reconcile.claims import AGAIN_S, Claims, StatusRefused
from kvrouter.operator.reconcile.link_reader import READ_AGAIN_S, LinkReader
from kvrouter.operator.reconcile.reconciler import (
    ClusterView,
    ControllerListener,
    Reconciler,
    Recorder,
    last_levels,
    node_name_of,
)
from kvrouter.operator.reconcile.workqueue import Workqueue
from kvrouter.operator.status import Workers

_POLICIES_RESOURCE = "mutatingadmissionpolicies"
COPIES_SINCE = (1, 35)
"""From this version on a Binding's labels reach its pod, unless somebody turned that off."""


async def read_facts(cluster: KubeClient, *, is_first: bool = True) -> ClusterFacts:
    """Return the facts of now. Topologies that may not be read are unread, with the reason.

    Raises ClusterError when the cluster cannot be asked; unless this ``is_first``, also where it answers with
    an error of its own (429, 5xx): the topologies that were read before hold.
    """
    policies = await cluster.served("admissionregistration.k8s.io/v1")
    version = await cluster.version()
    grove, why, found = Grove.ABSENT, "", list[Manifest]()
    for kind in TOPOLOGIES:
        try:
            found += (await cluster.find(kind)).objects
        except RequestRefused as refused:
            if not is_first and refused.status not in (NOT_FOUND, FORBIDDEN):
                raise
            if refused.status != NOT_FOUND:
                grove, why = Grove.UNREAD, refused.message
        else:
            grove = Grove.PRESENT if grove is Grove.ABSENT else grove
    topologies = [topology for topology in map(read_topology, found) if topology is not None]
    return ClusterFacts(
        grove=grove,
        topologies=by_name(topologies),
        unread_because=why,
        has_mutating_policies=_POLICIES_RESOURCE in policies,
        copies_binding_labels=version >= COPIES_SINCE,
    )


async def facts_for_admission(cluster: KubeClient) -> ClusterFacts:
    """Return the facts of now; a cluster that does not answer leaves its topologies unread."""
    try:
        return await read_facts(cluster)
    except ClusterError as error:
        return ClusterFacts(grove=Grove.UNREAD, unread_because=error.message)


RECONCILES_AT_A_TIME = 4
GATHER_S = 0.2
"""Changes of pods and of owned objects come in bursts: they are handled together."""
FACTS_S = 15.0
"""How often topologies are read again."""
OTHERS_WITHIN_S = 10.0
"""For how long nodes, cordons and registered workers are waited for at the start: they may never come, where
they may not be read."""
RESYNC_S = 600.0
"""How often everything is reconciled, and applied, whether something changed or not."""

G = TypeVar("G", bound=Hashable)


class Controller:
    """One term as leader: everything is read again at its start."""

    def __init__(
        self,
        cluster: KubeClient,
        *,
        defaults: PlanDefaults,
        identity: str,
        lease: Key,
        namespace: str,
        listener: ControllerListener,
        class_name: str = DEFAULT_CLASS,
        facts_s: float = FACTS_S,
        links_s: float = READ_AGAIN_S,
    ) -> None:
        self._cluster, self._listener = cluster, listener
        self._facts_s, self._links_s = facts_s, links_s
        self._facts = ClusterFacts()
        self._facts_lost = False
        self._workqueue = Workqueue[Key]()
        self._stirred = asyncio.Event()
        self._owners: dict[str, Key] = {}
        self._generations: dict[Key, tuple[str, object]] = {}
        self._asked: dict[Key, tuple[str, object] | None] = {}
        self._node_labels: dict[str, object] = {}
        self._node_cordons: dict[str, Cordon | None] = {}
        self._nodes_stirred = asyncio.Event()

        def watched(
            kind: ResourceKind,
            labels: str,
            group_of: Callable[[Manifest], G],
            changed: Callable[[Manifest], None],
            is_wanted: Callable[[Manifest], bool] = lambda _: True,
        ) -> Informer[G]:
            return Informer(
                cluster,
                kind,
                labels=labels,
                namespace=namespace,
                group_of=group_of,
                changed=changed,
                lost=lambda error: self._watch_lost(kind, error),
                is_wanted=is_wanted,
            )

        self._deployments = watched(
            DEPLOYMENTS_OF_GRAPHS,
            "",
            lambda _: None,
            self._deployment_changed,
            lambda found: class_of(found) == class_name,
        )
        self._owned = {
            kind: watched(kind, f"app.kubernetes.io/managed-by={MANAGER}", owner_uid_of, self._owned_changed)
            for kind in OWNED
        }
        self._pods = watched(PODS, DEPLOYMENT_LABEL, _deployment_of, self._pod_changed)
        self._nodes = watched(NODES, "", lambda _: None, self._node_changed)
        self._fleets: dict[Key, Key] = {}
        self._cards = Cards(self._fleet_changed)
        self._reads_cards = defaults.discovery is DiscoveryBackend.KUBERNETES
        self._workers = watched(WORKERS, FLEET_LABEL, fleet_of, self._card_changed)
        self._workers_unread = "they were not read yet"
        self._applied = Applier(cluster, self._owned)
        self._claims = Claims(cluster, lease, time.monotonic, class_name)
        self._bindings = Bindings(cluster, lease)
        self._bindings_due = False
        self._bindings_error: ClusterError | None = None
        self._bindings_failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))
        self._links = LinkReader(self._add, clock=time.monotonic)
        self._reconciler = Reconciler(
            cluster,
            ClusterView(self._deployments, self._pods, self._nodes, self._workers_of, self._links),
            self._applied,
            defaults=defaults,
            recorder=Recorder(cluster, identity, listener.event_refused),
            listener=listener,
            name=self._claims.name,
        )
        self._others: dict[Key, str] = {}

    async def run(self) -> None:
        """Watch and reconcile until cancelled."""
        watches: list[Informer[None] | Informer[str] | Informer[Key]] = [
            self._deployments,
            *(each for kind, each in self._owned.items() if kind != CORDONS),
            self._pods,
        ]
        others: list[Informer[None] | Informer[str] | Informer[Key]] = [self._nodes, self._owned[CORDONS]]
        if self._reads_cards:
            others.append(self._workers)
        async with asyncio.TaskGroup() as group:
            for each in (*watches, *others):
                group.create_task(each.run())
            for each in watches:
                await each.synced.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(OTHERS_WITHIN_S):
                    for other in others:
                        await other.synced.wait()
            await self._read_facts(is_first=True)
            group.create_task(self._follow_nodes())
            group.create_task(self._follow_cordons())
            group.create_task(self._every(self._facts_s, self._read_facts))
            group.create_task(self._every(RESYNC_S, self._resync))
            group.create_task(self._every(EXPIRE_S, self._expire))
            group.create_task(self._every(self._links_s, self._links.read))
            group.create_task(self._every(AGAIN_S, self._requeue_others))
            for _ in range(RECONCILES_AT_A_TIME):
                group.create_task(self._reconcile_due())

    async def _reconcile_due(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = self._workqueue.take(loop.time())
            if key is None:
                await self._until_due()
                continue
            self._listener.waiting(len(self._workqueue))
            began_s = loop.time()
            error: Exception | None = None
            retry_s = 0.0
            again_s: float | None = None
            try:
                if not await self._is_anothers(key):
                    await self._know_topology(key)
                    await self._write_bindings()
                    refused = self._bindings.refused.get(key, "")
                    again_s = await self._reconciler.reconcile(key, self._facts, policy_refused=refused)
            except StatusRefused as failed:
                error = failed
                with suppress(ClusterError):  # the log has the refused status, which explains more
                    await self._reconciler.report_status_refused(key, failed)
            except Exception as failed:  # noqa: BLE001 - one deployment's trouble must not stop the others
                error = failed
            if error is None:
                self._workqueue.done(key)
                if again_s is not None:
                    self._add(key, again_s)
            else:
                self._applied.forget(key)
                retry_s = self._workqueue.failed(key, loop.time())
            self._stirred.set()
            self._listener.looked(key, loop.time() - began_s, error, retry_s)

    async def _is_anothers(self, key: Key) -> bool:
        """Whether another operator manages a deployment; this one then leaves everything of it alone."""
        found = self._deployments.get(key)
        is_leaving = found is None or bool(metadata_of(found).get("deletionTimestamp"))
        holder = None if found is None or is_leaving else await self._claims.other(found)
        if holder != self._others.get(key):
            self._bindings_due = True
            self._listener.stood_back(key, holder)
        if holder is None:
            self._others.pop(key, None)
            return False
        self._others[key] = holder
        await self._reconciler.leave(key, holder)
        return True

    async def _requeue_others(self) -> None:
        for key in self._others:
            self._add(key)

    async def _know_topology(self, key: Key) -> None:
        """A topology may be newer than what was read; the admitting replica had read it again."""
        found, generation = self._deployments.get(key), self._generations.get(key)
        if found is None or self._asked.get(key) == generation or is_known(found, self._facts):
            return
        self._asked[key] = generation
        await self._read_facts()

    async def _write_bindings(self) -> None:
        """Labels at the binding come before the pods, where the cluster can do that. Without them labels come
        late, and engines wait for them: that stops no deployment.
        """
        if not (self._bindings_due and self._facts.has_mutating_policies and self._nodes.synced.is_set()):
            return
        self._bindings_due = False
        wanted = [
            each
            for found in self._deployments.all()
            if key_of(found) not in self._others
            if (each := wanted_by(found, self._facts, last_levels(self._applied, found))) is not None
        ]
        before = self._bindings.refused
        try:
            nodes = [node for node in map(read_node, self._nodes.all()) if node is not None]
            await self._bindings.write(wanted, nodes)
        except ClusterError as error:
            self._bindings_error = error
            self._bindings_due = isinstance(error, ClusterLost) or (
                isinstance(error, RequestRefused) and error.is_passing
            )
            self._listener.lost(POLICIES, error)
        else:
            self._bindings_failures.reset()
            if self._bindings_error is not None:
                self._bindings_error = None
                self._listener.lost(POLICIES, None)
        for key, said in self._bindings.refused.items():
            if before.get(key) != said:
                self._add(key)

    async def _follow_nodes(self) -> None:
        """Policies for bindings know where every node is."""
        await self._nodes.synced.wait()
        self._requeue_all()
        while True:
            await self._nodes_stirred.wait()
            await asyncio.sleep(gather_s(len(self._node_labels)))
            self._nodes_stirred.clear()
            self._bindings_due = True
            await self._write_bindings()
            if self._bindings_error is not None and self._bindings_due:
                await asyncio.sleep(wait_after(self._bindings_failures, self._bindings_error))
                self._nodes_stirred.set()

    async def _follow_cordons(self) -> None:
        """What nodes are annotated with is written once it is known what is there."""
        await self._owned[CORDONS].synced.wait()
        self._requeue_all()

    async def _until_due(self) -> None:
        self._stirred.clear()
        due_s = self._workqueue.next_due_s()
        loop = asyncio.get_running_loop()
        wait_s = None if due_s is None else max(due_s - loop.time(), 0.0)
        try:
            async with asyncio.timeout(wait_s):
                await self._stirred.wait()
        except TimeoutError:
            return

    async def _every(self, period_s: float, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            await do()

    async def _read_facts(self, *, is_first: bool = False) -> None:
        """Read topologies; while they cannot be read, those that were read last hold."""
        failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))
        while True:
            try:
                facts = await read_facts(self._cluster, is_first=is_first)
                facts = replace(facts, nodes_unread_because=self._facts.nodes_unread_because)
            except ClusterError as error:
                if not self._facts_lost:
                    self._facts_lost = True
                    self._listener.lost(TOPOLOGIES[0], error)
                if not is_first:
                    return
                await asyncio.sleep(wait_after(failures, error))
                continue
            if self._facts_lost:
                self._facts_lost = False
                self._listener.lost(TOPOLOGIES[0], None)
            if facts != self._facts:
                self._facts = facts
                self._requeue_all()
            return

    async def _expire(self) -> None:
        self._cards.expire(asyncio.get_running_loop().time())

    def _workers_of(self, fleet: Key, has_pod: Callable[[str], bool]) -> Workers:
        if not self._reads_cards:
            return Workers(
                unknown_because="they announce themselves in NATS, which the operator does not read"
            )
        if not self._workers.synced.is_set():
            return Workers(unknown_because=self._workers_unread)
        return Workers(self._cards.of(fleet, has_pod=has_pod))

    async def _resync(self) -> None:
        self._applied.forget()
        self._bindings.forget()
        self._requeue_all()

    def _requeue_all(self) -> None:
        self._bindings_due = True
        for manifest in self._deployments.all():
            self._add(key_of(manifest))

    def _add(self, key: Key, in_s: float = 0.0) -> None:
        self._workqueue.add(key, asyncio.get_running_loop().time() + in_s)
        self._stirred.set()

    def _watch_lost(self, kind: ResourceKind, error: ClusterError | None) -> None:
        self._listener.lost(kind, error)
        if kind == WORKERS:
            self._cards_lost(error)
        if kind == NODES:
            why = "" if error is None else error.message
            self._facts = replace(self._facts, nodes_unread_because=why)
            self._requeue_all()

    def _cards_lost(self, error: ClusterError | None) -> None:
        if error is None:
            self._cards.watch_restored(asyncio.get_running_loop().time())
        else:
            self._cards.watch_lost()
            self._workers_unread = error.message
        self._requeue_all()

    def _card_changed(self, manifest: Manifest) -> None:
        is_there = self._workers.get(key_of(manifest)) is not None
        self._cards.update(manifest, asyncio.get_running_loop().time(), is_there=is_there)

    def _fleet_changed(self, fleet: Key) -> None:
        key = self._fleets.get(fleet)
        if key is not None:
            self._add(key, GATHER_S)

    def _deployment_changed(self, manifest: Manifest) -> None:
        key, uid = key_of(manifest), uid_of(manifest)
        if self._deployments.get(key) is None:
            self._owners.pop(uid, None)
            self._fleets.pop(Key(key.namespace, fleet_name(*key)), None)
            self._claims.forget(key)
            self._generations.pop(key, None)
            self._asked.pop(key, None)
            self._bindings_due = True
        else:
            self._owners[uid] = key
            self._fleets[Key(key.namespace, fleet_name(*key))] = key
            said = (uid, _said_in(manifest))
            if self._generations.get(key) != said:
                self._generations[key] = said
                self._bindings_due = True
            elif self._reconciler.is_own_status(manifest):
                return  # our own status: a reconcile for it would retry at once what was just refused
        self._add(key)

    def _owned_changed(self, manifest: Manifest) -> None:
        key = self._owners.get(owner_uid_of(manifest))
        if key is not None:
            self._add(key, GATHER_S)

    def _pod_changed(self, manifest: Manifest) -> None:
        self._add(_deployment_of(manifest), GATHER_S)

    def _node_changed(self, manifest: Manifest) -> None:
        """Its status changes often, and its labels rarely."""
        name, labels = key_of(manifest).name, metadata_of(manifest).get("labels")
        is_there = self._nodes.get(key_of(manifest)) is not None
        cordon = node_cordon(manifest) if is_there else None
        if cordon != self._node_cordons.get(name):
            self._node_cordons[name] = cordon
            if self._nodes.synced.is_set():
                self._requeue_all()
        if not is_there:
            self._node_labels.pop(name, None)
            self._node_cordons.pop(name, None)
            self._nodes_stirred.set()
            return
        if name in self._node_labels and self._node_labels[name] == labels:
            return
        self._node_labels[name] = labels
        self._nodes_stirred.set()
        if not self._nodes.synced.is_set():
            return  # all deployments are reconciled once all nodes are there
        for pod in self._pods.all():
            if node_name_of(pod) == name:
                self._add(_deployment_of(pod), GATHER_S)


def _said_in(manifest: Manifest) -> tuple[object, ...]:
    """What users write in a deployment; all else in it is the operator's and the API server's."""
    parts = ("generation", "deletionTimestamp", "labels", "annotations")
    return tuple(metadata_of(manifest).get(part) for part in parts)


def _deployment_of(pod: Manifest) -> Key:
    labels = metadata_of(pod).get("labels")
    name = labels.get(DEPLOYMENT_LABEL) if isinstance(labels, dict) else ""
    return Key(key_of(pod).namespace, str(name))
