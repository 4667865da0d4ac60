"""The admission policies that label pods in the write that binds them: one for each set of levels in use."""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.operator.api import Level, read_deployment
from kvrouter.operator.facts import ClusterFacts
from kvrouter.operator.labels import Copy, PolicyScope, binding_policy, resolve
from kvrouter.operator.plan import MANAGER, object_name
from kvrouter.operator.policy import read_policy
from kvrouter.operator.reconcile.cluster import Cluster
from kvrouter.operator.reconcile.kinds import Kind, Manifest, key_of, uid_of

POLICIES = Kind(
    "admissionregistration.k8s.io/v1",
    "MutatingAdmissionPolicy",
    "mutatingadmissionpolicies",
    is_namespaced=False,
)
POLICY_BINDINGS = POLICIES._replace(
    name="MutatingAdmissionPolicyBinding", plural="mutatingadmissionpolicybindings"
)
KINDS = (POLICIES, POLICY_BINDINGS)


class Wanted(NamedTuple):
    """What one deployment's workers get when they are bound."""

    namespace: str
    workloads: tuple[str, ...]
    copies: tuple[Copy, ...]


def wanted_by(found: Manifest, facts: ClusterFacts, last_levels: Sequence[Level]) -> Wanted | None:
    """Return what a deployment wants; None without a policy, or when it cannot be read."""
    deployment = read_deployment(found).deployment
    policy = None if deployment is None else read_policy(deployment.spec).policy
    if deployment is None or policy is None:
        return None
    of = deployment.metadata
    workers = [component for component in deployment.spec.components if component.type.is_worker]
    names = tuple(object_name(of.name, component.name) for component in workers)
    return Wanted(of.namespace, names, resolve(policy, facts, last_levels).copies) if names else None


def policies_for(wanted: Iterable[Wanted], prefix: str) -> dict[str, tuple[Manifest, ...]]:
    """Return the manifests by the name that both of a set have: ``prefix`` and a hash of its levels."""
    groups: dict[tuple[Copy, ...], list[Wanted]] = {}
    for each in wanted:
        groups.setdefault(each.copies, []).append(each)
    found = {}
    for copies, members in groups.items():
        name = f"{prefix}{hashlib.sha256(repr([tuple(copy) for copy in copies]).encode()).hexdigest()[:12]}"
        scope = PolicyScope(
            tuple(sorted({member.namespace for member in members})),
            tuple(sorted({workload for member in members for workload in member.workloads})),
        )
        found[name] = binding_policy(name, copies, scope)
    return found


class Bindings:
    """Writes those policies, and removes its own that nobody wants any more. ``reach`` is the namespace that
    the operator looks after, empty for all: operators apart do not remove each other's.
    """

    def __init__(self, cluster: Cluster, reach: str) -> None:
        self._cluster = cluster
        digest = hashlib.sha256(reach.encode()).hexdigest()[:8]
        self._prefix = f"kvrouter-topology-{digest}-"
        self._there: dict[str, tuple[Manifest, ...]] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def write(self, wanted: Iterable[Wanted]) -> None:
        """Make the cluster's policies be those that are wanted. Raises ClusterError."""
        policies = policies_for(wanted, self._prefix)
        async with self._one_at_a_time:
            if self._there == policies:
                return
            there, self._there = self._there, None
            for name, manifests in policies.items():
                if there is None or there.get(name) != manifests:
                    for kind, manifest in zip(KINDS, manifests, strict=True):
                        await self._cluster.apply(kind, manifest)
            await self._prune(policies)
            self._there = policies

    def forget(self) -> None:
        """Write everything again the next time, whoever changed it meanwhile."""
        self._there = None

    async def _prune(self, policies: Mapping[str, object]) -> None:
        for kind in reversed(KINDS):
            found = await self._cluster.find(kind, labels=f"app.kubernetes.io/managed-by={MANAGER}")
            for manifest in found.objects:
                key = key_of(manifest)
                if key.name.startswith(self._prefix) and key.name not in policies:
                    await self._cluster.delete(kind, key, uid=uid_of(manifest))
