"""The ``Ready`` and ``TopologyResolved`` conditions, and the status of components."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrouter.kube.objects import fields_of, objects_in
from kvrouter.operator.api.deployment import ComponentSpec, ComponentType
from kvrouter.operator.api.status import ComponentStatus, ConditionStatus
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.level_labels import LevelLabels, Resolution, Source
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import TYPE_LABEL
from kvrouter.operator.policy import DeploymentPolicy
from kvrouter.operator.status.finding import Finding, named
from kvrouter.settings.problems import Problem, dotted

PROBLEMS_REPORTED_MAX = 5
MESSAGE_CHARS_MAX = 1024
"""The limit for the API server's message on one object: a policy engine may write pages."""


@dataclass(frozen=True, slots=True)
class RefusedObjects:
    """Objects of a deployment that the API server refused, a line each with its message: ``writes``, ``pods``
    of components, and ``labels`` of pods. ``taken`` are objects of another owner in the place of this
    deployment's. ``are_lasting``: the writes are refused until somebody changes something.
    """

    writes: Sequence[str] = ()
    are_lasting: bool = True
    taken: Sequence[str] = ()
    pods: Sequence[str] = ()
    labels: Sequence[str] = ()


NOTHING_REFUSED = RefusedObjects()
NAME_TAKEN_FIX = (
    "there already, and not this deployment's. It is left as it is: delete it, or give the deployment or its "
    "component another name"
)


def component_status(component: ComponentSpec, workload: Mapping[str, object] | None) -> ComponentStatus:
    """Return the status of a component, from its Deployment as the API server returns it."""
    found = workload or {}
    status = fields_of(found.get("status"))
    scaled = count_of(fields_of(found.get("spec")).get("replicas", 1))
    return ComponentStatus(
        name=component.name,
        type=component.type.value,
        desired_replicas=scaled if component.replicas is None else component.replicas,
        replicas=count_of(status.get("replicas")),
        ready_replicas=count_of(status.get("readyReplicas")),
        updated_replicas=n_updated(found),
    )


def n_updated(workload: Mapping[str, object]) -> int:
    """Return how many pods of a Deployment have its template: none until its controller has observed its
    latest generation.
    """
    return count_of(fields_of(workload.get("status")).get("updatedReplicas")) if is_observed(workload) else 0


def is_observed(workload: Mapping[str, object]) -> bool:
    """Return whether a Deployment's status is about its latest generation."""
    status, metadata = fields_of(workload.get("status")), fields_of(workload.get("metadata"))
    return count_of(status.get("observedGeneration")) >= count_of(metadata.get("generation"))


def condition_of(workload: Mapping[str, object], kind: str) -> Mapping[str, object]:
    """Return a Deployment's condition of this type; empty while its status is about an earlier generation."""
    conditions = fields_of(workload.get("status")).get("conditions") if is_observed(workload) else None
    return next((each for each in objects_in(conditions) if each.get("type") == kind), {})


def invalid_spec(problems: Sequence[Problem]) -> Finding:
    """Return the finding that nothing can be planned, with the fields to fix."""
    listed = "; ".join(
        f"{dotted(problem.path)} {problem.must}" for problem in problems[:PROBLEMS_REPORTED_MAX]
    )
    message = f"nothing is changed in the cluster until this is fixed: {listed}"
    return Finding(ConditionStatus.FALSE, "SpecInvalid", message)


def refused_pods(component: ComponentSpec, workload: Mapping[str, object] | None) -> str | None:
    """Return the API server's message on pods that a Deployment may not create; None if it may.

    Errors of quotas, limits and Pod Security are reported only there: the Deployment itself was accepted.
    """
    failure = condition_of(workload or {}, "ReplicaFailure")
    return f"{component.name}: {failure.get('message')}" if failure.get("status") == "True" else None


def ready(
    components: Sequence[ComponentSpec],
    found: Sequence[ComponentStatus],
    problems: Sequence[Problem],
    refusals: RefusedObjects = NOTHING_REFUSED,
) -> Finding:
    """Return the ``Ready`` finding: whether all objects are in the cluster as planned, and every component
    has the desired number of Ready pods with its latest template.
    """
    if problems:
        return invalid_spec(problems)
    if refusals.writes:
        message = f"the API server refuses {joined(refusals.writes)}. The operator goes on trying"
        return Finding(ConditionStatus.FALSE, "WriteRefused", message)
    if refusals.taken:
        message = f"{joined(refusals.taken)}: {NAME_TAKEN_FIX}"
        return Finding(ConditionStatus.FALSE, "NameTaken", message)
    by_name = {status.name: status for status in found}
    present = [by_name[component.name] for component in components if component.name in by_name]
    if len(present) < len(components):
        return Finding(ConditionStatus.FALSE, "NotApplied", "not every component is in the cluster yet")
    updating = [
        f"{status.name} {min(status.updated_replicas, status.desired_replicas)} of {status.desired_replicas}"
        for status in present
        if status.updated_replicas < status.desired_replicas or status.replicas > status.updated_replicas
    ]
    missing = [
        f"{status.name} {status.ready_replicas} of {status.desired_replicas}"
        for status in present
        if status.ready_replicas < status.desired_replicas
    ]
    if refusals.pods and (updating or missing):
        message = f"the API server refuses pods of {joined(refusals.pods)}"
        return Finding(ConditionStatus.FALSE, "PodsRefused", message)
    if updating:
        return Finding(
            ConditionStatus.FALSE, "Updating", f"pods of the latest template: {', '.join(updating)}"
        )
    if missing:
        message = f"Ready pods: {', '.join(missing)}. kubectl describe pod shows what the others wait for"
        return Finding(ConditionStatus.FALSE, "PodsNotReady", message)
    count = sum(status.desired_replicas for status in present)
    return Finding(ConditionStatus.TRUE, "AllPodsReady", f"all {count} pods are Ready")


def joined(lines: Sequence[str]) -> str:
    """Return the first of these lines, each cut, and the number of further lines."""
    shown = [
        line if len(line) <= MESSAGE_CHARS_MAX else f"{line[: MESSAGE_CHARS_MAX - 1]}…"
        for line in lines[:PROBLEMS_REPORTED_MAX]
    ]
    more = len(lines) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def count_of(found: object) -> int:
    """Return a number of pods in a Deployment's status; 0 if it states none."""
    return found if isinstance(found, int) and found > 0 else 0


def resolved(
    policy: DeploymentPolicy,
    resolution: Resolution,
    pods: Iterable[Pod],
    cluster_info: ClusterInfo,
    refusals: RefusedObjects = NOTHING_REFUSED,
) -> Finding:
    """Return the ``TopologyResolved`` finding: every bound worker has its value of the policy's domain."""
    labels = policy_level(policy, resolution)
    if not resolution.source.is_found:
        known = (
            ConditionStatus.UNKNOWN if resolution.source is Source.TOPOLOGY_UNREAD else ConditionStatus.FALSE
        )
        return Finding(known, resolution.source.value, _not_found(policy, resolution.source, cluster_info))
    bound = [pod for pod in pods if pod.node_name and not pod.is_over and _is_worker(pod)]
    if not bound:
        return Finding(ConditionStatus.UNKNOWN, "NoPodsBound", "no worker is bound to a node yet")
    waiting = [pod for pod in bound if labels.pod_label not in pod.labels]
    if waiting:
        message = (
            f"{len(waiting)} workers have no label {labels.pod_label}: {named(pod.name for pod in waiting)}. "
            f"Their engines wait for it. {_who_copies(cluster_info, refusals)}"
        )
        return Finding(ConditionStatus.FALSE, "LabelsNotCopied", message)
    nodes = {str(pod.node_name) for pod in bound if not pod.labels[labels.pod_label]}
    if nodes:
        message = (
            f"nodes without the label {labels.node_label}: {named(nodes)}. Engines there wait for it, or "
            f"count as nowhere. Label them (kubectl label node NODE {labels.node_label}=VALUE), or keep "
            "workers off"
        )
        return Finding(ConditionStatus.FALSE, "NodeLabelMissing", message)
    message = f"{len(bound)} workers know their {policy.domain} (node label {labels.node_label})"
    return Finding(ConditionStatus.TRUE, "AllWorkersPlaced", message)


def policy_level(policy: DeploymentPolicy, resolution: Resolution) -> LevelLabels:
    """Return the labels of the policy's own domain, which every resolution has."""
    return next(level for level in resolution.level_labels if level.domain == policy.domain)


def _is_worker(pod: Pod) -> bool:
    return pod.labels.get(TYPE_LABEL) not in (None, ComponentType.FRONTEND.value)


def _who_copies(cluster_info: ClusterInfo, refusals: RefusedObjects) -> str:
    if refusals.labels:
        return f"The API server refuses that the operator copies it: {joined(refusals.labels)}"
    if not cluster_info.nodes_unread_because:
        return "The operator copies it from their nodes; see its log when it does not"
    return (
        f"The operator cannot read nodes ({cluster_info.nodes_unread_because}): let it have the role for "
        "nodes (rbac.nodes of the chart), or have something else copy the label"
    )


def _not_found(policy: DeploymentPolicy, source: Source, cluster_info: ClusterInfo) -> str:
    why = {
        Source.GROVE_ABSENT: "this cluster has no ClusterTopologyBinding or ClusterTopology (grove.io): "
        "install Grove, or name a node label instead",
        Source.TOPOLOGY_UNREAD: f"it cannot be read ({cluster_info.unread_because}); it is tried again",
        Source.TOPOLOGY_ABSENT: "no such topology is in this cluster: create it, or name a node label",
        Source.LEVEL_ABSENT: f"{policy.domain} is none of its levels: add the level, or name another domain",
    }
    return f"{policy.source}: {why[source]}. Until then pods keep the levels that were known last"
