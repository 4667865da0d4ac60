"""The Deployments of a deployment: what their own status says, and whether everything is there."""

from collections.abc import Mapping, Sequence

from kvrouter.config.problems import Problem, dotted
from kvrouter.operator.api import Component, ComponentStatus, ConditionStatus
from kvrouter.operator.status.finding import Finding

PROBLEMS_TOLD_MAX = 5


def component_status(component: Component, workload: Mapping[str, object] | None) -> ComponentStatus:
    """Return what a component's Deployment, as the API server tells it, says of its pods.

    Nothing of it counts as updated until its controller has seen its latest generation.
    """
    found = workload or {}
    status, metadata = _mapping(found.get("status")), _mapping(found.get("metadata"))
    is_seen = _count(status.get("observedGeneration")) >= _count(metadata.get("generation"))
    return ComponentStatus(
        name=component.name,
        type=component.type.value,
        replicas=_count(status.get("replicas")),
        ready_replicas=_count(status.get("readyReplicas")),
        updated_replicas=_count(status.get("updatedReplicas")) if is_seen else 0,
    )


def invalid_spec(problems: Sequence[Problem]) -> Finding:
    """Return that nothing can be planned, and the fields that are to be mended."""
    told = "; ".join(f"{dotted(problem.path)} {problem.must}" for problem in problems[:PROBLEMS_TOLD_MAX])
    message = f"nothing is changed in the cluster until this is mended: {told}"
    return Finding(ConditionStatus.FALSE, "SpecInvalid", message)


def ready(
    components: Sequence[Component], found: Sequence[ComponentStatus], problems: Sequence[Problem]
) -> Finding:
    """Return whether every component has as many Ready pods of its latest template as it should."""
    if problems:
        return invalid_spec(problems)
    by_name = {status.name: status for status in found}
    pairs = [(component, by_name[component.name]) for component in components if component.name in by_name]
    if len(pairs) < len(components):
        return Finding(ConditionStatus.FALSE, "NotApplied", "not every component is in the cluster yet")
    updating = [
        f"{component.name} {min(status.updated_replicas, component.replicas)} of {component.replicas}"
        for component, status in pairs
        if status.updated_replicas < component.replicas or status.replicas > status.updated_replicas
    ]
    missing = [
        f"{component.name} {status.ready_replicas} of {component.replicas}"
        for component, status in pairs
        if status.ready_replicas < component.replicas
    ]
    if updating:
        return Finding(
            ConditionStatus.FALSE, "Updating", f"pods of the latest template: {', '.join(updating)}"
        )
    if missing:
        message = f"Ready pods: {', '.join(missing)}. kubectl describe pod shows what the others wait for"
        return Finding(ConditionStatus.FALSE, "PodsNotReady", message)
    count = sum(component.replicas for component in components)
    return Finding(ConditionStatus.TRUE, "AllPodsReady", f"all {count} pods are Ready")


def _mapping(found: object) -> Mapping[str, object]:
    return found if isinstance(found, dict) else {}


def _count(found: object) -> int:
    return found if isinstance(found, int) and found > 0 else 0
