"""Nodes and pods, as the operator reads them from the cluster's objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrouter.kube.objects import fields_of, objects_in

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of pods: a ReplicaSet that shrinks removes Ready pods with a lower cost first."""


class Unstartable(StrEnum):
    """Why a container cannot start."""

    NO_IMAGE = "its image cannot be pulled"
    BAD_IMAGE_NAME = "its image has no valid name"
    NO_CONFIG = "a Secret or ConfigMap that it refers to is missing, or has no such key"


UNSTARTABLE = {
    "ErrImagePull": Unstartable.NO_IMAGE,
    "ImagePullBackOff": Unstartable.NO_IMAGE,
    "ErrImageNeverPull": Unstartable.NO_IMAGE,
    "InvalidImageName": Unstartable.BAD_IMAGE_NAME,
    "CreateContainerConfigError": Unstartable.NO_CONFIG,
}
"""Reasons that a kubelet gives for a waiting container; some alternate while it tries again."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its labels."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. ``node_name`` is None until it is bound; ``is_over`` once it has ended or is being deleted.

    ``is_stuck``: it cannot be scheduled, or one of its containers cannot start or was restarted.
    ``unstartable`` is why one of its containers cannot start until somebody changes something. ``created`` is
    its creation time in ISO 8601, ``ready_since`` when it last became Ready or ceased to be, ``address`` its
    IP. ``is_failing``: one of its containers cannot start or was restarted. ``deletion_cost`` is stated for
    ReplicaSets that shrink.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    node_name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_over: bool = False
    is_stuck: bool = False
    is_failing: bool = False
    unstartable: Unstartable | None = None
    created: str = ""
    ready_since: str = ""
    deletion_cost: str | None = None
    address: str | None = None


def read_node(document: object) -> Node | None:
    """Return the node that ``document``, any JSON value, describes; None for any other document."""
    metadata = fields_of(fields_of(document).get("metadata"))
    name = _text(metadata.get("name"))
    return Node(name, _labels(metadata)) if name else None


def read_pod(document: object) -> Pod | None:
    """Return the pod that ``document``, any JSON value, describes; None for any other document."""
    fields = fields_of(document)
    metadata, status = fields_of(fields.get("metadata")), fields_of(fields.get("status"))
    name = _text(metadata.get("name"))
    if not name:
        return None
    ready = _condition(status, "Ready")
    return Pod(
        name=name,
        namespace=_text(metadata.get("namespace")),
        uid=_text(metadata.get("uid")),
        node_name=_text(fields_of(fields.get("spec")).get("nodeName")) or None,
        labels=_labels(metadata),
        is_ready=ready.get("status") == "True",
        is_over=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        is_stuck=_is_unscheduled(status) or _is_failing(status),
        is_failing=_is_failing(status),
        unstartable=_unstartable(status),
        created=_text(metadata.get("creationTimestamp")),
        ready_since=_text(ready.get("lastTransitionTime")),
        deletion_cost=_text(fields_of(metadata.get("annotations")).get(DELETION_COST)) or None,
        address=_text(status.get("podIP")) or None,
    )


def _condition(status: Mapping[str, object], kind: str) -> Mapping[str, object]:
    found = objects_in(status.get("conditions"))
    return next((entry for entry in found if entry.get("type") == kind), {})


def _is_unscheduled(status: Mapping[str, object]) -> bool:
    return _condition(status, "PodScheduled").get("status") == "False"


def _is_failing(status: Mapping[str, object]) -> bool:
    return any(bool(each.get("restartCount")) or _cannot_start(each) for each in _containers(status))


def _unstartable(status: Mapping[str, object]) -> Unstartable | None:
    found = [UNSTARTABLE.get(_waits_for(container)) for container in _containers(status)]
    return next((why for why in found if why is not None), None)


def _containers(status: Mapping[str, object]) -> list[Mapping[str, object]]:
    names = ("initContainerStatuses", "containerStatuses")
    return [container for name in names for container in objects_in(status.get(name))]


def _cannot_start(container: Mapping[str, object]) -> bool:
    return _waits_for(container) not in ("", "ContainerCreating", "PodInitializing")


def _waits_for(container: Mapping[str, object]) -> str:
    return _text(fields_of(fields_of(container.get("state")).get("waiting")).get("reason"))


def _labels(metadata: Mapping[str, object]) -> dict[str, str]:
    found = fields_of(metadata.get("labels"))
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""
