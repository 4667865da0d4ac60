"""The place of every node, for the webhook that labels pods at their binding."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvrouter.kube.client import ClusterError, KubeClient
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import Key, Manifest, key_of, metadata_of, uid_of
from kvrouter.operator.api.deployment import DEFAULT_CLASS, class_of
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES, ClusterInfo
from kvrouter.operator.labels.binding import BindingTarget
from kvrouter.operator.labels.level_labels import LevelLabels, is_pod_of, pod_labels, pod_name_stem
from kvrouter.operator.labels.pods import read_node
from kvrouter.operator.reconcile.bindings import is_known, wanted_by
from kvrouter.operator.reconcile.info_reader import INFO_EACH_S, InfoReader, Lost

AGAIN_S = 1.0
"""How soon topologies are read again after a deployment named an unknown one."""


class _Workers(NamedTuple):
    """The worker pods of one deployment, by the stems of their names, and their level labels."""

    stems: tuple[str, ...]
    level_labels: tuple[LevelLabels, ...]


class BindingLabels:
    """Returns a pod's labels by the watched deployments and its node, which is read at that moment.

    Deployments are watched only if a Binding's labels reach its pod and the cluster has no policies to write
    them. Levels of a missing topology are unknown here: their labels come late.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        lost: Lost,
        class_name: str = DEFAULT_CLASS,
        info_each_s: float = INFO_EACH_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._client = client
        self._info_each_s, self._again_s = info_each_s, again_s
        self._cluster_info: ClusterInfo | None = None
        self._info_reader = InfoReader(client, changed=self._info_changed, lost=lost)
        self._stale = asyncio.Event()
        self._workers: dict[str, dict[Key, _Workers]] = {}
        self._generations: dict[Key, tuple[str, object]] = {}
        self._deployments: Informer[None] = Informer(
            client,
            DEPLOYMENTS_OF_GRAPHS,
            namespace=namespace,
            group_of=lambda _: None,
            changed=self._changed,
            lost=lambda error: lost(DEPLOYMENTS_OF_GRAPHS, error),
            is_wanted=lambda found: class_of(found) == class_name,
        )

    async def run(self) -> None:
        """Keep up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            following: asyncio.Task[None] | None = None
            while True:
                self._stale.clear()
                if await self._info_reader.read() is not None:
                    self._stale.set()
                if following is None and self._cluster_info is not None and _is_wanted(self._cluster_info):
                    following = group.create_task(self._deployments.run())
                await asyncio.sleep(self._again_s)
                await self._until_stale()

    async def labels_of(self, target: BindingTarget) -> Mapping[str, str] | None:
        """Return the level labels of a pod for its node; None if they are unknown.

        Empty for a pod that is no deployment's worker, or that a policy labels.
        """
        if self._cluster_info is None:
            return None
        if not _is_wanted(self._cluster_info):
            return {}
        if not self._deployments.synced.is_set():
            return None
        level_labels = self._level_labels_for(target)
        if not level_labels:
            return {}
        try:
            found = await self._client.read(NODES, Key("", target.node))
        except ClusterError:
            return None
        node = None if found is None else read_node(found)
        return None if node is None else pod_labels(node.labels, level_labels)

    def _level_labels_for(self, target: BindingTarget) -> Sequence[LevelLabels]:
        """Return the level labels for a pod's name; if several stems fit a cut name, the longest counts."""
        found = {
            stem: workers.level_labels
            for workers in self._workers.get(target.namespace, {}).values()
            for stem in workers.stems
            if is_pod_of(stem, target.name)
        }
        return found[max(found, key=len)] if found else ()

    def _info_changed(self, cluster_info: ClusterInfo) -> None:
        self._cluster_info = cluster_info
        for found in self._deployments.all():
            self._learn(found)

    async def _until_stale(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._info_each_s):
                await self._stale.wait()

    def _changed(self, manifest: Manifest) -> None:
        key = key_of(manifest)
        if self._deployments.get(key) is None:
            self._generations.pop(key, None)
            self._forget(key)
            return
        generation = (uid_of(manifest), metadata_of(manifest).get("generation"))
        if self._generations.get(key) == generation:
            return  # its status alone
        self._generations[key] = generation
        self._learn(manifest)
        if self._cluster_info is None or not is_known(manifest, self._cluster_info):
            self._stale.set()

    def _learn(self, manifest: Manifest) -> None:
        key = key_of(manifest)
        self._forget(key)
        if self._cluster_info is None or not is_known(manifest, self._cluster_info):
            return
        wanted = wanted_by(manifest, self._cluster_info, ())
        if wanted is not None:
            stems = tuple(map(pod_name_stem, wanted.workloads))
            self._workers.setdefault(key.namespace, {})[key] = _Workers(stems, wanted.level_labels)

    def _forget(self, key: Key) -> None:
        workers = self._workers.get(key.namespace, {})
        workers.pop(key, None)
        if not workers:
            self._workers.pop(key.namespace, None)


def _is_wanted(cluster_info: ClusterInfo) -> bool:
    """Whether only the webhook can label pods in time."""
    return cluster_info.copies_binding_labels and not cluster_info.has_mutating_policies
