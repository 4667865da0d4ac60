"""The place of every node, for the webhook that labels pods when they are bound."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvrouter.kube.client import ClusterError, KubeClient
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import Key, Manifest, key_of, metadata_of, uid_of
from kvrouter.operator.api.deployment import DEFAULT_CLASS, class_of
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES, ClusterFacts
from kvrouter.operator.labels.binding import BindingTarget
from kvrouter.operator.labels.copies import Copy, is_pod_of, pod_labels, pod_name_stem, read_node
from kvrouter.operator.reconcile.bindings import is_known, wanted_by
from kvrouter.operator.reconcile.info_reader import FACTS_S, InfoReader, Lost

AGAIN_S = 1.0
"""How soon after a deployment named one that is not known."""


class _Workers(NamedTuple):
    """The worker pods of one deployment, by the starts of their names, and what they get."""

    stems: tuple[str, ...]
    copies: tuple[Copy, ...]


class NodePlaces:
    """Answers from what it watches, and reads of a pod's node what it says at that moment.

    Deployments are followed only where a Binding's labels reach its pod and no policy of the cluster writes
    them. Levels of a topology that is not found are not known here: such labels come late.
    """

    def __init__(
        self,
        cluster: KubeClient,
        *,
        namespace: str,
        lost: Lost,
        class_name: str = DEFAULT_CLASS,
        facts_s: float = FACTS_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._cluster = cluster
        self._facts_s, self._again_s = facts_s, again_s
        self._facts: ClusterFacts | None = None
        self._info_reader = InfoReader(cluster, changed=self._facts_changed, lost=lost)
        self._stale = asyncio.Event()
        self._workers: dict[str, dict[Key, _Workers]] = {}
        self._generations: dict[Key, tuple[str, object]] = {}
        self._deployments: Informer[None] = Informer(
            cluster,
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
                if following is None and self._facts is not None and _is_wanted(self._facts):
                    following = group.create_task(self._deployments.run())
                await asyncio.sleep(self._again_s)
                await self._until_stale()

    async def labels_of(self, pod: BindingTarget) -> Mapping[str, str] | None:
        """Return the labels of a pod that goes to its node; None when they are not known.

        None at all for a pod that is no deployment's worker, or that gets them by itself.
        """
        if self._facts is None:
            return None
        if not _is_wanted(self._facts):
            return {}
        if not self._deployments.synced.is_set():
            return None
        copies = self._copies_for(pod)
        if not copies:
            return {}
        try:
            found = await self._cluster.read(NODES, Key("", pod.node))
        except ClusterError:
            return None
        node = None if found is None else read_node(found)
        return None if node is None else pod_labels(node.labels, copies)

    def _copies_for(self, pod: BindingTarget) -> Sequence[Copy]:
        """Of two that a name may be of, as names that were cut may be, the one with more of it."""
        found = {
            stem: workers.copies
            for workers in self._workers.get(pod.namespace, {}).values()
            for stem in workers.stems
            if is_pod_of(stem, pod.name)
        }
        return found[max(found, key=len)] if found else ()

    def _facts_changed(self, facts: ClusterFacts) -> None:
        self._facts = facts
        for found in self._deployments.all():
            self._learn(found)

    async def _until_stale(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._facts_s):
                await self._stale.wait()

    def _changed(self, found: Manifest) -> None:
        key = key_of(found)
        if self._deployments.get(key) is None:
            self._generations.pop(key, None)
            self._forget(key)
            return
        generation = (uid_of(found), metadata_of(found).get("generation"))
        if self._generations.get(key) == generation:
            return  # its status alone
        self._generations[key] = generation
        self._learn(found)
        if self._facts is None or not is_known(found, self._facts):
            self._stale.set()

    def _learn(self, found: Manifest) -> None:
        key = key_of(found)
        self._forget(key)
        if self._facts is None or not is_known(found, self._facts):
            return
        wanted = wanted_by(found, self._facts, ())
        if wanted is not None:
            stems = tuple(map(pod_name_stem, wanted.workloads))
            self._workers.setdefault(key.namespace, {})[key] = _Workers(stems, wanted.copies)

    def _forget(self, key: Key) -> None:
        workers = self._workers.get(key.namespace, {})
        workers.pop(key, None)
        if not workers:
            self._workers.pop(key.namespace, None)


def _is_wanted(facts: ClusterFacts) -> bool:
    """Whether a webhook is what brings labels to pods in time."""
    return facts.copies_binding_labels and not facts.has_mutating_policies
