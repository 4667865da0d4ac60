"""Labels that could not come with the binding: older clusters, and node labels that come or change later."""

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.labels.copies import Copy, pod_labels
from kvrouter.operator.labels.seen import Node, Pod


class LateLabels(NamedTuple):
    """A merge patch for the pod, None when nothing is to be done; and the levels that its node does not have.

    The patch names the pod's uid, so that the API server refuses it (409) for a later pod of the same name.
    """

    patch: dict[str, JsonValue] | None
    missing: tuple[Copy, ...] = ()


def late_labels(pod: Pod, node: Node, copies: Sequence[Copy]) -> LateLabels:
    """Return what is to be done about a pod whose node says ``node.labels`` now.

    Nothing for a pod that is not bound to this node, or is over. A value that the node lacks is written as an
    empty one, as at a binding: that nobody knows its worker's place then shows on the pod.
    """
    if pod.node_name != node.name or pod.is_over:
        return LateLabels(None)
    missing = tuple(copy for copy in copies if not node.labels.get(copy.node_label))
    wanted = pod_labels(node.labels, copies)
    changed: dict[str, JsonValue] = {
        key: value for key, value in wanted.items() if pod.labels.get(key) != value
    }
    if not changed:
        return LateLabels(None, missing)
    return LateLabels({"metadata": {"uid": pod.uid, "labels": changed}}, missing)
