"""Objects of Kubernetes as JSON: kinds and paths, keys and versions, and events about them."""

import hashlib
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec
from pydantic import JsonValue

from kvrouter.core.cordon_rules import Cordon, cordon_digest

Manifest = dict[str, JsonValue]
"""An object in the JSON of the API server."""


class ResourceKind(NamedTuple):
    """One kind: its name in manifests and in paths.

    ``is_metadata_enough``: lists and watches request metadata only. ``kept`` are the parts, such as
    ``spec.nodeName``, that are kept of each object besides its metadata; () keeps everything.
    """

    api_version: str
    name: str
    plural: str
    is_namespaced: bool = True
    is_metadata_enough: bool = False
    kept: tuple[str, ...] = ()

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of all objects, of those of a namespace, of one object, or of its subresource."""
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version]
        if self.is_namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


class Key(NamedTuple):
    """The key of an object among those of its kind; ``namespace`` is "" for a cluster-scoped kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = ResourceKind("v1", "Event", "events")
WORKERS = ResourceKind("kvrouter.dev/v1alpha1", "KvrouterWorker", "kvrouterworkers")
"""Worker cards."""
CORDONS = ResourceKind("kvrouter.dev/v1alpha1", "KvrouterCordon", "kvroutercordons")
"""Cordons of workers, nodes and zones."""
FLEET_LABEL = "kvrouter.dev/namespace"
"""The label with kvrouter's ``--namespace``, so that one Kubernetes namespace may hold several fleets."""

MESSAGE_CHARS_MAX = 1024
NAME_CHARS_MAX = 230
"""Limits of an event's message, and of its name before the digest."""


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


def fields_of(found: object) -> Manifest:
    """Return ``found`` if it is a JSON object, else an empty one."""
    return found if isinstance(found, dict) else {}


def objects_in(found: object) -> list[Manifest]:
    """Return the JSON objects in ``found`` if it is a list, else []."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def metadata_of(manifest: Manifest) -> Manifest:
    """Return the metadata of an object, {} without any."""
    return fields_of(manifest.get("metadata"))


def labels_of(manifest: Manifest) -> Manifest:
    """Return the labels of an object, {} without any."""
    return fields_of(metadata_of(manifest).get("labels"))


def annotations_of(manifest: Manifest) -> Manifest:
    """Return the annotations of an object, {} without any."""
    return fields_of(metadata_of(manifest).get("annotations"))


def key_of(manifest: Manifest) -> Key:
    """Return the key of an object, "" for missing names."""
    metadata = metadata_of(manifest)
    return Key(_text(metadata.get("namespace")), _text(metadata.get("name")))


def version_of(manifest: Manifest) -> str:
    """Return the resourceVersion of an object or a list."""
    return _text(metadata_of(manifest).get("resourceVersion"))


def uid_of(manifest: Manifest) -> str:
    """Return the uid of an object, "" without one."""
    return _text(metadata_of(manifest).get("uid"))


class Involved(NamedTuple):
    """The object that an event is about."""

    api_version: str
    kind: str
    key: Key
    uid: str


def event_of(
    about: Involved,
    reason: str,
    message: str,
    *,
    warns: bool,
    reporter: str,
    instance: str,
    now: datetime,
    digest_of: str = "",
) -> Manifest:
    """Return an event about an object, reported by ``reporter`` at ``now``, in UTC. Equal events have the
    same name; those that differ in ``digest_of`` have different names.
    """
    key, written = about.key, now.strftime("%Y-%m-%dT%H:%M:%SZ")
    text = "\0".join((about.uid, reason, message, digest_of))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.name,
        "metadata": {"namespace": key.namespace, "name": f"{key.name[:NAME_CHARS_MAX]}.{digest}"},
        "involvedObject": {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "namespace": key.namespace,
            "name": key.name,
            "uid": about.uid,
        },
        "type": "Warning" if warns else "Normal",
        "reason": reason,
        "message": message[:MESSAGE_CHARS_MAX],
        "count": 1,
        "firstTimestamp": written,
        "lastTimestamp": written,
        "source": {"component": reporter},
        "reportingComponent": reporter,
        "reportingInstance": instance,
    }


def name_in_fleet(fleet: str, key: str) -> str:
    """Return the name of a fleet's object, with ``.`` for each ``_`` of the fleet's name: fleets have no
    ``.``, so names of different fleets differ.
    """
    return f"{fleet.replace('_', '.')}-{key}"


def cordon_object(cordon: Cordon, *, namespace: str, fleet: str) -> Manifest:
    """Return the object of a cordon of one fleet."""
    spec: Manifest = msgspec.to_builtins(cordon)
    key = cordon_digest(cordon.level, cordon.name, cordon.source)
    return fleet_object(CORDONS, key, spec, namespace=namespace, fleet=fleet)


def fleet_object(kind: ResourceKind, key: str, spec: Manifest, *, namespace: str, fleet: str) -> Manifest:
    """Return an object of one fleet, in a Kubernetes namespace."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "namespace": namespace,
            "name": name_in_fleet(fleet, key),
            "labels": {FLEET_LABEL: fleet},
        },
        "spec": spec,
    }


def _text(found: JsonValue) -> str:
    return found if isinstance(found, str) else ""
