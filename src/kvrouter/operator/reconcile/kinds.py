"""The kinds of objects that the operator reads and writes."""

from kvrouter.kube.objects import ResourceKind
from kvrouter.operator.api import API_VERSION, GROVE_GROUP, GROVE_PLURALS, GROVE_VERSION, KIND, PLURAL

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
        "status.conditions",
        "status.initContainerStatuses",
        "status.containerStatuses",
    ),
)
NODES = ResourceKind("v1", "Node", "nodes", is_namespaced=False, is_metadata_enough=True)
