"""Pods and nodes as the API server tells of them, reduced to what is decided by."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its labels."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. ``node_name`` is None until it is bound; ``is_over`` once it ended or is being deleted.

    ``is_stuck``: it cannot be scheduled, or a container of it cannot start or ended and was started again.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    node_name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_over: bool = False
    is_stuck: bool = False


def read_node(document: object) -> Node | None:
    """Return the node that ``document``, any JSON value, describes; None for what is none."""
    metadata = _mapping(_mapping(document).get("metadata"))
    name = _text(metadata.get("name"))
    return Node(name, _labels(metadata)) if name else None


def read_pod(document: object) -> Pod | None:
    """Return the pod that ``document``, any JSON value, describes; None for what is none."""
    fields = _mapping(document)
    metadata, status = _mapping(fields.get("metadata")), _mapping(fields.get("status"))
    name = _text(metadata.get("name"))
    if not name:
        return None
    return Pod(
        name=name,
        namespace=_text(metadata.get("namespace")),
        uid=_text(metadata.get("uid")),
        node_name=_text(_mapping(fields.get("spec")).get("nodeName")) or None,
        labels=_labels(metadata),
        is_ready=_is_ready(status),
        is_over=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        is_stuck=_is_stuck(status),
    )


def _is_ready(status: Mapping[str, object]) -> bool:
    found = _mappings(status.get("conditions"))
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in found)


def _is_stuck(status: Mapping[str, object]) -> bool:
    conditions = _mappings(status.get("conditions"))
    if any(entry.get("type") == "PodScheduled" and entry.get("status") == "False" for entry in conditions):
        return True
    containers = [
        container
        for name in ("initContainerStatuses", "containerStatuses")
        for container in _mappings(status.get(name))
    ]
    return any(bool(each.get("restartCount")) or _cannot_start(each) for each in containers)


def _cannot_start(container: Mapping[str, object]) -> bool:
    waits = _mapping(_mapping(container.get("state")).get("waiting")).get("reason")
    return waits not in (None, "", "ContainerCreating", "PodInitializing")


def _mappings(found: object) -> list[Mapping[str, object]]:
    return [_mapping(entry) for entry in found] if isinstance(found, list) else []


def _labels(metadata: Mapping[str, object]) -> dict[str, str]:
    found = _mapping(metadata.get("labels"))
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _mapping(found: object) -> Mapping[str, object]:
    return found if isinstance(found, dict) else {}


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""
