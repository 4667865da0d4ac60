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
    """A pod. ``node_name`` is None until it is bound; ``is_over`` once it ended or is being deleted."""

    name: str
    namespace: str = ""
    uid: str = ""
    node_name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_over: bool = False


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
    )


def _is_ready(status: Mapping[str, object]) -> bool:
    conditions = status.get("conditions")
    found = [_mapping(entry) for entry in conditions] if isinstance(conditions, list) else []
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in found)


def _labels(metadata: Mapping[str, object]) -> dict[str, str]:
    found = _mapping(metadata.get("labels"))
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _mapping(found: object) -> Mapping[str, object]:
    return found if isinstance(found, dict) else {}


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""
