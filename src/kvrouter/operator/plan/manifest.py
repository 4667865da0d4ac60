"""Manifests as plain JSON: names, labels, hashes, and checked reads of user-written fields."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from kvrouter.kube.objects import fields_of, objects_in
from kvrouter.operator.api.deployment import ComponentSpec, DynamoGraphDeployment

Manifest = dict[str, JsonValue]


def mapping(found: JsonValue) -> Manifest:
    """Return a copy of ``found`` if it is an object, else an empty object."""
    return {**fields_of(found)}


def objects(found: JsonValue) -> list[Manifest]:
    """Return copies of the objects in ``found`` if it is a list, else an empty list."""
    return [{**entry} for entry in objects_in(found)]


def listed(entries: Sequence[Manifest]) -> list[JsonValue]:
    """Return ``entries`` as a JSON value."""
    return [*entries]


def strings(found: Mapping[str, str]) -> Manifest:
    """Return ``found`` as a JSON object."""
    return {**found}


def without_nothing(manifest: Manifest) -> Manifest:
    """Return ``manifest`` without the fields that are empty lists or objects."""
    return {key: value for key, value in manifest.items() if value not in ([], {})}


TEMPLATE_HASH = "kvrouter.dev/template-hash"
"""Annotation of a Deployment. Its pods do not have it: a change would roll them."""


def template_hash(template: Manifest) -> str:
    """Return 16 hexadecimal digits: SHA-256 over the template's canonical JSON."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


MANAGER = "kvrouter-operator"
"""The operator's field manager, and the value of ``managed-by`` on its objects."""

DEPLOYMENT_LABEL = "kvrouter.dev/deployment"
COMPONENT_LABEL = "kvrouter.dev/component"
TYPE_LABEL = "kvrouter.dev/component-type"

NAME_CHARS_MAX = 63
_HASH_CHARS = 8
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def object_name(deployment: str, component: str) -> str:
    """Return the name of a component's objects: ``<deployment>-<component>`` in lower case.

    A name that is too long for a Service, or no DNS label, is cut and ends in a hash: names are unique.
    """
    return _fitted(f"{deployment}-{component.lower()}", "-")


def fleet_name(namespace: str, deployment: str) -> str:
    """Return the name of a deployment's fleet, which its processes share: it is unique in the cluster."""
    return _fitted(f"{namespace or 'default'}_{deployment}", "_")


def selector(deployment: str, component: str) -> dict[str, str]:
    """Return the labels that select a component's pods; they never change."""
    return {DEPLOYMENT_LABEL: _fitted(deployment, "-"), COMPONENT_LABEL: component}


def labels_of(deployment: DynamoGraphDeployment, component: ComponentSpec | None = None) -> Manifest:
    """Return the labels of a component's objects and pods; with None those of the other objects."""
    of = _fitted(deployment.metadata.name, "-")
    found = {"app.kubernetes.io/name": "kvrouter", "app.kubernetes.io/instance": of}
    if component is not None:
        found["app.kubernetes.io/component"] = component.type.value
    found["app.kubernetes.io/managed-by"] = MANAGER
    found[DEPLOYMENT_LABEL] = of
    if component is not None:
        found |= {COMPONENT_LABEL: component.name, TYPE_LABEL: component.type.value}
    return strings(found)


def _fitted(name: str, joint: str) -> str:
    plain = name.replace(joint, "-", 1)
    if len(name) <= NAME_CHARS_MAX and _DNS_LABEL.fullmatch(plain):
        return name
    stem = re.sub(r"[^-a-z0-9]", "-", name.lower().replace(joint, "-"))[: NAME_CHARS_MAX - _HASH_CHARS - 1]
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    stem = stem.strip("-")
    return f"{stem}-{digest}" if _DNS_LABEL.fullmatch(stem) else f"d{stem}-{digest}"[:NAME_CHARS_MAX]
