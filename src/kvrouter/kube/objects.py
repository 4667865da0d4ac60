"""Objects of Kubernetes as JSON: their kinds and paths, their keys and versions, and events about them."""

import hashlib
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec
from pydantic import JsonValue

from kvrouter.core.cordon_rules import Cordon, cordon_digest

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


LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = ResourceKind("v1", "Event", "events")
WORKERS = ResourceKind("kvrouter.dev/v1alpha1", "KvrouterWorker", "kvrouterworkers")
"""Workers that registered through the API server."""
CORDONS = ResourceKind("kvrouter.dev/v1alpha1", "KvrouterCordon", "kvroutercordons")
"""Workers, nodes and zones that get no new requests."""
FLEET_LABEL = "kvrouter.dev/namespace"
"""Carries the ``--namespace`` of kvrouter, so that one namespace of Kubernetes may hold several fleets."""

MESSAGE_CHARS_MAX = 1024
NAME_CHARS_MAX = 230
"""What the API server takes of an event's message, and of its name before the digest."""


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


def fields_of(found: object) -> Manifest:
    """Return ``found`` where it is a JSON object, else an empty one."""
    return found if isinstance(found, dict) else {}


def objects_in(found: object) -> list[Manifest]:
    """Return the JSON objects in ``found`` where it is a list, else none."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def metadata_of(manifest: Manifest) -> Manifest:
    """Return the metadata of an object, empty where it has none."""
    return fields_of(manifest.get("metadata"))


def labels_of(manifest: Manifest) -> Manifest:
    """Return the labels of an object, empty where it has none."""
    return fields_of(metadata_of(manifest).get("labels"))


def annotations_of(manifest: Manifest) -> Manifest:
    """Return the annotations of an object, empty where it has none."""
    return fields_of(metadata_of(manifest).get("annotations"))


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


class Involved(NamedTuple):
    """What an event is about."""

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
    """Return an event about an object, which ``reporter`` reports at ``now``, in UTC. The same event has the
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
    """Return the name of an object of a fleet, which has a ``.`` where its fleet's has a ``_``: no fleet's
    name has a ``.``, so no two are written alike.
    """
    return f"{fleet.replace('_', '.')}-{key}"


def cordon_object(cordon: Cordon, *, namespace: str, fleet: str) -> Manifest:
    """Return the object of a cordon of one fleet."""
    spec: Manifest = msgspec.to_builtins(cordon)
    key = cordon_digest(cordon.level, cordon.name, cordon.source)
    return fleet_object(CORDONS, key, spec, namespace=namespace, fleet=fleet)


def fleet_object(kind: ResourceKind, key: str, spec: Manifest, *, namespace: str, fleet: str) -> Manifest:
    """Return an object of one fleet, in a namespace of Kubernetes."""
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
