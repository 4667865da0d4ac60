"""The sources of changes: what is watched and read, and which deployments are queued for each change."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pydantic import JsonValue

from kvrouter.core.cordon_rules import Cordon
from kvrouter.kube.client import ClusterError, KubeClient
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import (
    CORDONS,
    FLEET_LABEL,
    WORKERS,
    Key,
    Manifest,
    ResourceKind,
    fields_of,
    key_of,
    labels_of,
    metadata_of,
    uid_of,
)
from kvrouter.operator.api.deployment import class_of
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES, PODS, ClusterInfo
from kvrouter.operator.plan.manifest import DEPLOYMENT_LABEL, MANAGER, fleet_name
from kvrouter.operator.plan.node_cordons import node_cordon
from kvrouter.operator.reconcile.apply import OWNED, owner_uid_of
from kvrouter.operator.reconcile.cards import EXPIRE_S, Cards, fleet_of
from kvrouter.operator.reconcile.frontend_reader import FrontendReader
from kvrouter.operator.reconcile.info_reader import InfoReader, Lost
from kvrouter.operator.status.available import Workers

GATHER_S = 0.2
"""Changes of pods and of owned objects come in bursts: they are handled together after this time."""
OTHERS_WITHIN_S = 10.0
"""How long the start waits for nodes, cordons and registered workers, which may be unreadable."""

Enqueue = Callable[[Key, float], None]
"""Makes a deployment due in so many seconds, or earlier if it was due before."""

G = TypeVar("G", bound=Hashable)


class _NodeState(NamedTuple):
    """The parts of a node that plans depend on; its other fields change often."""

    labels: JsonValue
    cordon: Cordon | None


class Sources:
    """Watches the cluster, and queues deployments by ``enqueue``.

    | a change of | queues |
    |---|---|
    | a deployment, but for a status that ``is_own_status`` | it |
    | an object that a deployment owns, a pod | that deployment, after ``GATHER_S`` |
    | a registered worker; what a frontend learned | its deployment |
    | a node's labels | the deployments that have pods on it, and the policies for bindings |
    | a node's cordon, the cluster information, whether nodes or workers can be read | every deployment |

    ``nodes`` may never sync where they may not be read. Policies for bindings are queued by
    ``bindings_are_due``, and after a burst of changes by ``nodes_changed``.
    """

    def __init__(
        self,
        client: KubeClient,
        enqueue: Enqueue,
        *,
        is_own_status: Callable[[Manifest], bool],
        lost: Lost,
        namespace: str,
        class_name: str,
        reads_workers: bool,
        info_each_s: float,
        links_s: float,
    ) -> None:
        self.enqueue, self._is_own_status, self.lost = enqueue, is_own_status, lost

        def watched(
            kind: ResourceKind,
            labels: str,
            group_of: Callable[[Manifest], G],
            changed: Callable[[Manifest], None],
            is_wanted: Callable[[Manifest], bool] = lambda _: True,
        ) -> Informer[G]:
            return Informer(
                client,
                kind,
                labels=labels,
                namespace=namespace,
                group_of=group_of,
                changed=changed,
                lost=lambda error: self._watch_lost(kind, error),
                is_wanted=is_wanted,
            )

        self.deployments: Informer[None] = watched(
            DEPLOYMENTS_OF_GRAPHS,
            "",
            lambda _: None,
            self._deployment_changed,
            lambda found: class_of(found) == class_name,
        )
        self.owned = {
            kind: watched(kind, f"app.kubernetes.io/managed-by={MANAGER}", owner_uid_of, self._owned_changed)
            for kind in OWNED
        }
        self.pods = watched(PODS, DEPLOYMENT_LABEL, _deployment_of, self._pod_changed)
        self.nodes: Informer[None] = watched(NODES, "", lambda _: None, self._node_changed)
        self.cluster_info = ClusterInfo()
        self.frontends = FrontendReader(lambda key: enqueue(key, 0.0), clock=time.monotonic)
        self.bindings_are_due = False
        self.nodes_changed = asyncio.Event()
        self._workers = watched(WORKERS, FLEET_LABEL, fleet_of, self._card_changed) if reads_workers else None
        self._cards = Cards(self._changed_of)
        self.info_reader = InfoReader(client, changed=self._info_changed, lost=lost)
        self._by_name: dict[str | Key, Key] = {}
        """Deployments by uid and by fleet."""
        self._specs: dict[Key, tuple[object, ...]] = {}
        self._node_states: dict[str, _NodeState] = {}
        self._info_each_s, self._links_s = info_each_s, links_s

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Watch in tasks of ``group``; return once everything that plans depend on was read."""
        needed: list[Informer[Any]] = [self.deployments, self.pods]
        needed += [informer for kind, informer in self.owned.items() if kind != CORDONS]
        others: list[Informer[Any]] = [self.nodes, self.owned[CORDONS]]
        others += [] if self._workers is None else [self._workers]
        for each in (*needed, *others):
            group.create_task(each.run())
        await asyncio.gather(*(each.synced.wait() for each in needed))
        with suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_WITHIN_S):
                await asyncio.gather(*(each.synced.wait() for each in others))
        await self.info_reader.read_until_known()
        for synced in (self.nodes.synced, self.owned[CORDONS].synced):
            group.create_task(self._enqueue_all_once(synced))
        group.create_task(every(self._info_each_s, self.info_reader.read))
        group.create_task(every(EXPIRE_S, self._expire))
        group.create_task(every(self._links_s, self.frontends.read))

    def enqueue_all(self) -> None:
        """Queue every deployment, and the policies for bindings."""
        self.bindings_are_due = True
        for manifest in self.deployments.all():
            self.enqueue(key_of(manifest), 0.0)

    def workers_of(self, fleet: Key, has_pod: Callable[[str], bool]) -> Workers:
        """Return the registered workers of a fleet; ``has_pod`` returns whether a pod exists."""
        if self._workers is not None and self._workers.synced.is_set():
            return Workers(self._cards.of(fleet, has_pod=has_pod))
        elsewhere = "they announce themselves in NATS, which the operator does not read"
        return Workers(unknown_because=self._cards.unread_because if self._workers else elsewhere)

    async def _enqueue_all_once(self, synced: asyncio.Event) -> None:
        await synced.wait()
        self.enqueue_all()

    async def _expire(self) -> None:
        self._cards.expire(asyncio.get_running_loop().time())

    def _info_changed(self, cluster_info: ClusterInfo) -> None:
        self.cluster_info = replace(cluster_info, nodes_unread_because=self.cluster_info.nodes_unread_because)
        self.enqueue_all()

    def _watch_lost(self, kind: ResourceKind, error: ClusterError | None) -> None:
        self.lost(kind, error)
        if kind == WORKERS and error is None:
            self._cards.watch_restored(asyncio.get_running_loop().time())
        elif kind == WORKERS and error is not None:
            self._cards.watch_lost(error.message)
        elif kind == NODES:
            why = "" if error is None else error.message
            self.cluster_info = replace(self.cluster_info, nodes_unread_because=why)
        if kind in (WORKERS, NODES):
            self.enqueue_all()

    def _deployment_changed(self, manifest: Manifest) -> None:
        key, uid, spec = key_of(manifest), uid_of(manifest), spec_of(manifest)
        fleet = Key(key.namespace, fleet_name(*key))
        if self.deployments.get(key) is None:
            for name in (uid, fleet):
                self._by_name.pop(name, None)
            self._specs.pop(key, None)
            self.bindings_are_due = True
        else:
            self._by_name[uid] = self._by_name[fleet] = key
            if self._specs.get(key) != spec:
                self._specs[key] = spec
                self.bindings_are_due = True
            elif self._is_own_status(manifest):
                return  # a reconcile for it would retry a refused write at once
        self.enqueue(key, 0.0)

    def _owned_changed(self, manifest: Manifest) -> None:
        self._changed_of(owner_uid_of(manifest))

    def _pod_changed(self, manifest: Manifest) -> None:
        self.enqueue(_deployment_of(manifest), GATHER_S)

    def _card_changed(self, manifest: Manifest) -> None:
        is_there = self._workers is not None and self._workers.get(key_of(manifest)) is not None
        self._cards.update(manifest, asyncio.get_running_loop().time(), is_there=is_there)

    def _changed_of(self, name: str | Key) -> None:
        key = self._by_name.get(name)
        if key is not None:
            self.enqueue(key, GATHER_S)

    def _node_changed(self, manifest: Manifest) -> None:
        name, now = key_of(manifest).name, None
        known = self._node_states.pop(name, None)
        if self.nodes.get(key_of(manifest)) is not None:
            now = _NodeState(metadata_of(manifest).get("labels"), node_cordon(manifest))
            self._node_states[name] = now
        is_synced = self.nodes.synced.is_set()  # before that, each listed node would queue everything
        if is_synced and (known and known.cordon) != (now and now.cordon):
            self.enqueue_all()
        if known is not None and now is not None and known.labels == now.labels:
            return
        self.nodes_changed.set()
        if is_synced and now is not None:
            for pod in self.pods.all():
                if node_name_of(pod) == name:
                    self.enqueue(_deployment_of(pod), GATHER_S)


async def every(period_s: float, do: Callable[[], Awaitable[object]]) -> None:
    """Call ``do`` every ``period_s`` seconds until cancelled, first after that time."""
    while True:
        await asyncio.sleep(period_s)
        await do()


def spec_of(manifest: Manifest) -> tuple[object, ...]:
    """Return the user-written parts of a deployment, as a value that changes with them; its other parts are
    written by the operator and the API server.
    """
    parts = ("generation", "deletionTimestamp", "labels", "annotations")
    return (uid_of(manifest), *(metadata_of(manifest).get(part) for part in parts))


def node_name_of(pod: Manifest) -> str:
    """Return the node that a pod is bound to; empty if it is not bound."""
    name = fields_of(pod.get("spec")).get("nodeName")
    return name if isinstance(name, str) else ""


def _deployment_of(pod: Manifest) -> Key:
    return Key(key_of(pod).namespace, str(labels_of(pod).get(DEPLOYMENT_LABEL)))
