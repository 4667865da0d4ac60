"""Cluster information as the operator read it: kinds of objects, nodes and topologies (``ClusterInfo``)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrouter.kube.objects import ResourceKind
from kvrouter.operator.api.deployment import API_VERSION, KIND, PLURAL
from kvrouter.operator.api.grove import GROVE_GROUP, GROVE_PLURALS, GROVE_VERSION, ClusterTopology


class Grove(StrEnum):
    """Whether Grove's topologies could be read."""

    ABSENT = "absent"
    """The cluster does not have Grove's kinds."""
    PRESENT = "present"
    UNREAD = "unread"
    """Unknown: the API server did not answer, or did not allow the read."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Information about the cluster by which deployments are validated and planned.

    ``unread_because`` is why Grove's topologies are unknown, ``nodes_unread_because`` why nodes are.
    ``has_mutating_policies``: the cluster serves MutatingAdmissionPolicy v1. ``copies_binding_labels``: the
    API server copies a Binding's labels to its pod in the same write.
    """

    grove: Grove = Grove.ABSENT
    topologies: Mapping[str, ClusterTopology] = field(default_factory=dict)
    unread_because: str = ""
    nodes_unread_because: str = ""
    has_mutating_policies: bool = False
    copies_binding_labels: bool = False


def by_name(topologies: Iterable[ClusterTopology]) -> dict[str, ClusterTopology]:
    """Return topologies by name. A ClusterTopologyBinding wins over a ClusterTopology of its name."""
    found = sorted(
        topologies, key=lambda topology: (topology.kind == "ClusterTopologyBinding", topology.name)
    )
    return {topology.name: topology for topology in found}


DEPLOYMENTS_OF_GRAPHS = ResourceKind(API_VERSION, KIND, PLURAL)
TOPOLOGIES = tuple(
    ResourceKind(f"{GROVE_GROUP}/{GROVE_VERSION}", name, plural, is_namespaced=False)
    for name, plural in GROVE_PLURALS.items()
)
PODS = ResourceKind(
    "v1",
    "Pod",
    "pods",
    kept=(
        "spec.nodeName",
        "status.phase",
        "status.podIP",
        "status.conditions",
        "status.initContainerStatuses",
        "status.containerStatuses",
    ),
)
NODES = ResourceKind("v1", "Node", "nodes", is_namespaced=False, is_metadata_enough=True)
