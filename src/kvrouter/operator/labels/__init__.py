"""What a pod is told of the node that it is bound to: labels, in the very write that binds it."""

from kvrouter.operator.labels.binding import (
    BoundPod,
    binding_patch,
    binding_policy,
)
from kvrouter.operator.labels.copies import Copy, Resolution, Source, copies_of, pod_labels, resolve
from kvrouter.operator.labels.late import LateLabels, late_labels
from kvrouter.operator.labels.places import (
    PLACES_KIND,
    PLACES_PLURAL,
    PLACES_VERSION,
    gather_s,
    is_pod_of,
    node_places,
    pod_name_stem,
)
from kvrouter.operator.labels.seen import Node, Pod, read_node, read_pod

__all__ = [
    "PLACES_KIND",
    "PLACES_PLURAL",
    "PLACES_VERSION",
    "BoundPod",
    "Copy",
    "LateLabels",
    "Node",
    "Pod",
    "Resolution",
    "Source",
    "binding_patch",
    "binding_policy",
    "copies_of",
    "gather_s",
    "is_pod_of",
    "late_labels",
    "node_places",
    "pod_labels",
    "pod_name_stem",
    "read_node",
    "read_pod",
    "resolve",
]
