"""The kinds of objects that the operator reads and writes, and their API paths."""

from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.api import API_VERSION, GROVE_GROUP, GROVE_PLURALS, GROVE_VERSION, KIND, PLURAL

Manifest = dict[str, JsonValue]
"""An object as the API server takes and gives it."""


class ResourceKind(NamedTuple):
    """One kind: what manifests call it, and what paths do.

    ``is_metadata_enough``: lists and watches bring nothing but metadata. ``kept`` are the parts, such as
    ``spec.nodeName``, that are kept with metadata of what they bring; everything where none is named.
    """

    api_version: str
    name: str
    plural: str
    is_namespaced: bool = True
    is_metadata_enough: bool = False
    kept: tuple[str, ...] = ()

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of all objects, of those of a namespace, of one, or of a part of one."""
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version]
        if self.is_namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


class Key(NamedTuple):
    """The place of one object among those of its kind; the namespace is empty where the kind has none."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


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
EVENTS = ResourceKind("v1", "Event", "events")
LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")


def metadata_of(manifest: Manifest) -> Manifest:
    """Return the metadata of an object, empty where it has none."""
    found = manifest.get("metadata")
    return found if isinstance(found, dict) else {}


def key_of(manifest: Manifest) -> Key:
    """Return the place of an object, with empty names where it has none."""
    metadata = metadata_of(manifest)
    return Key(_text(metadata.get("namespace")), _text(metadata.get("name")))


def version_of(manifest: Manifest) -> str:
    """Return the resourceVersion of an object or a list."""
    return _text(metadata_of(manifest).get("resourceVersion"))


def uid_of(manifest: Manifest) -> str:
    """Return the uid of an object, empty where it has none."""
    return _text(metadata_of(manifest).get("uid"))


def _text(found: JsonValue) -> str:
    return found if isinstance(found, str) else ""
