"""The cluster's state as the operator read it: kinds of objects, nodes, topologies (``ClusterFacts``)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrouter.kube.objects import ResourceKind
from kvrouter.operator.api.deployment import API_VERSION, KIND, PLURAL
from kvrouter.operator.api.grove import GROVE_GROUP, GROVE_PLURALS, GROVE_VERSION, ClusterTopology


class Grove(StrEnum):
    """Whether Grove's topologies could be read."""

    ABSENT = "absent"
    """The cluster does not know their kinds."""
    PRESENT = "present"
    UNREAD = "unread"
    """Not known: the cluster could not be asked, or did not allow it."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What deployments are judged and planned by.

    ``unread_because`` says why Grove's topologies are not known, ``nodes_unread_because`` why nodes are not.
    ``has_mutating_policies``: the cluster has MutatingAdmissionPolicy v1. ``copies_binding_labels``: a
    Binding's labels reach its pod in the same write.
    """

    grove: Grove = Grove.ABSENT
    topologies: Mapping[str, ClusterTopology] = field(default_factory=dict)
    unread_because: str = ""
    nodes_unread_because: str = ""
    has_mutating_policies: bool = False
    copies_binding_labels: bool = False


def by_name(topologies: Iterable[ClusterTopology]) -> dict[str, ClusterTopology]:
    """Return topologies by name; of two kinds with one name, a ClusterTopologyBinding is the one."""
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
