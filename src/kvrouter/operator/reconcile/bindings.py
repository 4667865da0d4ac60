"""The MutatingAdmissionPolicies that label pods at their binding: one for each set of levels in use."""

import asyncio
import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.kube.client import NOT_FOUND, ClusterError, ClusterLost, KubeClient, RequestRefused
from kvrouter.kube.informer import RETRY_MAX_S, RETRY_S, FirstTries, wait_after
from kvrouter.kube.objects import Key, Manifest, ResourceKind, key_of, labels_of, metadata_of, uid_of
from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.binding import binding_policy
from kvrouter.operator.labels.level_labels import (
    PLACES_KIND,
    PLACES_PLURAL,
    PLACES_VERSION,
    LevelLabels,
    gather_s,
    node_places,
    resolve,
)
from kvrouter.operator.labels.pods import Node, read_node
from kvrouter.operator.plan.manifest import object_name
from kvrouter.operator.policy import read_policy
from kvrouter.operator.reconcile.sources import Sources

POLICIES = ResourceKind(
    "admissionregistration.k8s.io/v1",
    "MutatingAdmissionPolicy",
    "mutatingadmissionpolicies",
    is_namespaced=False,
)
POLICY_BINDINGS = POLICIES._replace(
    name="MutatingAdmissionPolicyBinding", plural="mutatingadmissionpolicybindings"
)
PLACES = ResourceKind(PLACES_VERSION, PLACES_KIND, PLACES_PLURAL, is_namespaced=False)
KINDS = (PLACES, POLICIES, POLICY_BINDINGS)
"""In the order of writing: a policy's references are written before it, and removed after it."""

OWNER_CHARS_MAX = 54
OPERATOR_LABEL = "kvrouter.dev/operator"
"""Label that names the operator of a policy: a cluster may have several, each with its own lease."""


def owner_label(lease: Key) -> str:
    """Return the label value for the operator of ``lease``: its name, cut to fit, and a hash."""
    digest = hashlib.sha256(str(lease).encode()).hexdigest()[:8]
    return f"{str(lease).replace('/', '.')[:OWNER_CHARS_MAX].rstrip('-.')}-{digest}"


class WantedLabels(NamedTuple):
    """The level labels that a deployment's pods get at their binding: its workers, and frontends with a level
    in which prefill is near.
    """

    deployment: Key
    workloads: tuple[str, ...]
    level_labels: tuple[LevelLabels, ...]


def wanted_by(
    manifest: Manifest, cluster_info: ClusterInfo, last_levels: Sequence[Level]
) -> WantedLabels | None:
    """Return the labels that a deployment wants; None without a policy, or if it cannot be read."""
    deployment = read_deployment(manifest).deployment
    if deployment is None:
        return None
    reading = read_policy(deployment.spec)
    policy, of = reading.policy, deployment.metadata
    if policy is None:
        return None
    has_all = reading.settings.prefill is not None
    placed = [each for each in deployment.spec.components if has_all or each.type.is_worker]
    names = tuple(object_name(of.name, component.name) for component in placed)
    level_labels = resolve(policy, cluster_info, last_levels).level_labels
    return WantedLabels(Key(of.namespace, of.name), names, level_labels) if names else None


def is_known(manifest: Manifest, cluster_info: ClusterInfo) -> bool:
    """Return whether the levels that a deployment names are known; True if it names no level."""
    deployment = read_deployment(manifest).deployment
    policy = None if deployment is None else read_policy(deployment.spec).policy
    return policy is None or resolve(policy, cluster_info).source.is_found


def policies_for(
    wanted: Iterable[WantedLabels], nodes: Sequence[Node], lease: Key
) -> dict[str, tuple[Manifest, ...]]:
    """Return the manifests of each policy, one for each of KINDS, by its name: a hash of the lease and of its
    levels.
    """
    owner = owner_label(lease)
    groups: dict[tuple[LevelLabels, ...], list[WantedLabels]] = {}
    for each in wanted:
        groups.setdefault(each.level_labels, []).append(each)
    found = {}
    for level_labels, members in groups.items():
        name = _policy_name(level_labels, owner)
        workloads: dict[str, set[str]] = {}
        for member in members:
            workloads.setdefault(member.deployment.namespace, set()).update(member.workloads)
        manifests = (
            node_places(name, level_labels, nodes, workloads),
            *binding_policy(name, level_labels, workloads),
        )
        found[name] = tuple(_owned(manifest, owner) for manifest in manifests)
    return found


async def remove_policies(client: KubeClient, lease: Key, kept: Container[str] = ()) -> list[str]:
    """Remove the policies of the operator of ``lease`` and their references, except those named in ``kept``;
    return what was removed. Kinds that the cluster does not have are skipped. Raises ClusterError.
    """
    removed = []
    for kind in reversed(KINDS):
        try:
            found = await client.find(kind, labels=f"{OPERATOR_LABEL}={owner_label(lease)}")
        except RequestRefused as refused:
            if refused.status != NOT_FOUND:
                raise
            continue
        for manifest in found.objects:
            key = key_of(manifest)
            if key.name not in kept:
                await client.delete(kind, key, uid=uid_of(manifest))
                removed.append(f"{kind.name} {key}")
    return removed


class Bindings:
    """Writes the policies of the operator of ``lease``, and removes those that no deployment wants any
    longer.
    """

    def __init__(self, client: KubeClient, lease: Key) -> None:
        self._client, self._lease = client, lease
        self._current: dict[str, tuple[Manifest, ...]] | None = None
        self._one_at_a_time = asyncio.Lock()
        self.refused: Mapping[Key, str] = {}
        """The deployments with a policy that the API server refused at the last write, and its message."""

    async def write(self, wanted: Iterable[WantedLabels], nodes: Sequence[Node]) -> None:
        """Apply the wanted policies for these nodes, and remove this operator's others.

        Raises ClusterError, for a refused policy after the others.
        """
        wanted = list(wanted)
        policies = policies_for(wanted, nodes, self._lease)
        async with self._one_at_a_time:
            if self._current == policies:
                return
            current, self._current = self._current, None
            done: dict[str, tuple[Manifest, ...]] = {}
            refusals: dict[str, RequestRefused] = {}
            for name, manifests in policies.items():
                before = () if current is None else current.get(name, ())
                try:
                    for kind, manifest in zip(KINDS, manifests, strict=True):
                        if manifest not in before:
                            await self._client.apply(kind, manifest)
                except RequestRefused as refused:
                    refusals[name] = refused
                else:
                    done[name] = manifests
            owner = owner_label(self._lease)
            self.refused = {
                each.deployment: refusals[name].detail
                for each in wanted
                if (name := _policy_name(each.level_labels, owner)) in refusals
            }
            await remove_policies(self._client, self._lease, policies)
            self._current = done
            for refusal in refusals.values():
                raise refusal

    def forget(self) -> None:
        """Write everything again the next time, whatever other clients changed meanwhile."""
        self._current = None


class BindingsReconciler:
    """Writes the policies before the pods of a change. If the cluster cannot do that, or refuses one, labels
    come late and engines wait for them: no deployment is stopped.

    ``wanted`` returns the labels that a deployment wants. A deployment is queued when its policy is refused
    for the first time, or with another message.
    """

    def __init__(
        self, bindings: Bindings, sources: Sources, wanted: Callable[[Manifest], WantedLabels | None]
    ) -> None:
        self._bindings, self._sources, self._wanted = bindings, sources, wanted
        self._error: ClusterError | None = None
        self._is_lost = False
        self._first_tries = FirstTries()
        self._failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))

    async def write_due(self) -> None:
        """Write the policies if they are due and the nodes are known."""
        sources = self._sources
        can_write = sources.cluster_info.has_mutating_policies and sources.nodes.synced.is_set()
        if not (sources.bindings_are_due and can_write):
            return
        sources.bindings_are_due = False
        wanted = [each for each in map(self._wanted, sources.deployments.all()) if each is not None]
        nodes = [node for node in map(read_node, sources.nodes.all()) if node is not None]
        before = self._bindings.refused
        try:
            await self._bindings.write(wanted, nodes)
        except ClusterError as error:
            self._error = error
            sources.bindings_are_due = isinstance(error, ClusterLost) or (
                isinstance(error, RequestRefused) and error.is_passing
            )
            if not sources.bindings_are_due or self._first_tries.is_loss():
                self._is_lost = True
                sources.lost(POLICIES, error)
        else:
            self._failures.reset()
            self._first_tries.worked()
            self._error = None
            if self._is_lost:
                self._is_lost = False
                sources.lost(POLICIES, None)
        for key, refusal in self._bindings.refused.items():
            if before.get(key) != refusal:
                sources.enqueue(key, 0.0)

    async def follow_nodes(self) -> None:
        """Write the policies after each burst of node changes, until cancelled."""
        sources = self._sources
        await sources.nodes.synced.wait()
        while True:
            await sources.nodes_changed.wait()
            await asyncio.sleep(gather_s(len(sources.nodes.all())))
            sources.nodes_changed.clear()
            sources.bindings_are_due = True
            await self.write_due()
            if self._error is not None and sources.bindings_are_due:
                await asyncio.sleep(wait_after(self._failures, self._error))
                sources.nodes_changed.set()


def _policy_name(level_labels: tuple[LevelLabels, ...], owner: str) -> str:
    levels = hashlib.sha256(repr([tuple(level) for level in level_labels]).encode()).hexdigest()[:12]
    return f"kvrouter-topology-{owner.rpartition('-')[2]}-{levels}"


def _owned(manifest: Manifest, owner: str) -> Manifest:
    ours: Manifest = {**labels_of(manifest), OPERATOR_LABEL: owner}
    return {**manifest, "metadata": {**metadata_of(manifest), "labels": ours}}
