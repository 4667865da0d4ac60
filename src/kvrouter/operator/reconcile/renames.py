"""Removed components stay while new ones of their role start, as after a change of name."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from kvrouter.kube.objects import Manifest, key_of, labels_of, metadata_of
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, TYPE_LABEL, object_name
from kvrouter.operator.status.resolved import component_status
from kvrouter.operator.status.stalled import seconds_since


class Held(NamedTuple):
    """The removed components that stay, and in how many seconds the first of them goes in any case; None if
    no component stays.
    """

    components: frozenset[str]
    ends_s: float | None


def held_components(
    deployment: DynamoGraphDeployment, workloads: Iterable[Manifest], now: datetime, hold_s: float
) -> Held:
    """Return the components of ``workloads`` that the deployment no longer has, if a component of the same
    role came within ``hold_s``, or is yet to come, and has not all of its pods Ready.
    """
    old = {key_of(workload).name: workload for workload in workloads}
    ends: dict[str, float] = {}
    for component in deployment.spec.components:
        workload = old.pop(object_name(deployment.metadata.name, component.name), None)
        status = component_status(component, workload)
        is_ready = min(status.ready_replicas, status.updated_replicas) >= status.desired_replicas
        created = str(metadata_of(workload or {}).get("creationTimestamp"))
        left_s = hold_s - seconds_since(created, now)
        if left_s > 0 and not is_ready:
            ends[status.type] = max(left_s, ends.get(status.type, 0.0))
    held: dict[str, float] = {}
    for workload in old.values():
        labels = labels_of(workload)
        name, role = labels.get(COMPONENT_LABEL), labels.get(TYPE_LABEL)
        if isinstance(name, str) and isinstance(role, str) and role in ends:
            held[name] = ends[role]
    return Held(frozenset(held), min(held.values(), default=None))
