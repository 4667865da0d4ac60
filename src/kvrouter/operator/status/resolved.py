"""Whether the policy's domain is known: to the cluster's topology, to nodes, and to pods."""

from collections.abc import Iterable

from kvrouter.operator.api import ComponentType, ConditionStatus
from kvrouter.operator.facts import ClusterFacts
from kvrouter.operator.labels import Copy, Pod, Resolution, Source
from kvrouter.operator.plan import TYPE_LABEL
from kvrouter.operator.policy import DeploymentPolicy
from kvrouter.operator.status.finding import Finding, named
from kvrouter.operator.status.workloads import NOTHING_REFUSED, Refusals, joined


def resolved(
    policy: DeploymentPolicy,
    resolution: Resolution,
    pods: Iterable[Pod],
    facts: ClusterFacts,
    refusals: Refusals = NOTHING_REFUSED,
) -> Finding:
    """Return whether every worker that is bound to a node knows its value of the policy's domain."""
    copy = copy_of(policy, resolution)
    if not resolution.source.is_found:
        known = (
            ConditionStatus.UNKNOWN if resolution.source is Source.TOPOLOGY_UNREAD else ConditionStatus.FALSE
        )
        return Finding(known, resolution.source.value, _not_found(policy, resolution.source, facts))
    bound = [pod for pod in pods if pod.node_name and not pod.is_over and _is_worker(pod)]
    if not bound:
        return Finding(ConditionStatus.UNKNOWN, "NoPodsBound", "no worker is bound to a node yet")
    waiting = [pod for pod in bound if copy.pod_label not in pod.labels]
    if waiting:
        message = (
            f"{len(waiting)} workers have no label {copy.pod_label}: {named(pod.name for pod in waiting)}. "
            f"Their engines wait for it. {_who_copies(facts, refusals)}"
        )
        return Finding(ConditionStatus.FALSE, "LabelsNotCopied", message)
    nodes = {str(pod.node_name) for pod in bound if not pod.labels[copy.pod_label]}
    if nodes:
        message = (
            f"nodes without the label {copy.node_label}: {named(nodes)}. Engines there wait for it, or count "
            f"as nowhere. Label them (kubectl label node NODE {copy.node_label}=VALUE), or keep workers off"
        )
        return Finding(ConditionStatus.FALSE, "NodeLabelMissing", message)
    message = f"{len(bound)} workers know their {policy.domain} (node label {copy.node_label})"
    return Finding(ConditionStatus.TRUE, "AllWorkersPlaced", message)


def copy_of(policy: DeploymentPolicy, resolution: Resolution) -> Copy:
    """Return the label of the policy's own domain, which is always among those that are resolved."""
    return next(copy for copy in resolution.copies if copy.domain == policy.domain)


def _is_worker(pod: Pod) -> bool:
    return pod.labels.get(TYPE_LABEL) not in (None, ComponentType.FRONTEND.value)


def _who_copies(facts: ClusterFacts, refusals: Refusals) -> str:
    if refusals.labels:
        return f"The API server refuses that the operator copies it: {joined(refusals.labels)}"
    if not facts.nodes_unread_because:
        return "The operator copies it from their nodes; see its log when it does not"
    return (
        f"The operator cannot read nodes ({facts.nodes_unread_because}): let it have the role for nodes "
        "(rbac.nodes of the chart), or have something else copy the label"
    )


def _not_found(policy: DeploymentPolicy, source: Source, facts: ClusterFacts) -> str:
    why = {
        Source.GROVE_ABSENT: "this cluster has no ClusterTopologyBinding or ClusterTopology (grove.io): "
        "install Grove, or name a node label instead",
        Source.TOPOLOGY_UNREAD: f"it cannot be read ({facts.unread_because}); it is tried again",
        Source.TOPOLOGY_ABSENT: "no such topology is in this cluster: create it, or name a node label",
        Source.LEVEL_ABSENT: f"{policy.domain} is none of its levels: add the level, or name another domain",
    }
    return f"{policy.source}: {why[source]}. Until then pods keep the levels that were known last"
