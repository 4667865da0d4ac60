"""The Kubernetes object of a record: its structs and its encoding."""

import re
from dataclasses import dataclass
from datetime import datetime

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.kube.objects import FLEET_LABEL, ResourceKind
from kvrouter.transports.records.encoding import checked_namespace

RENEWALS_ANNOTATION = "kvrouter.dev/renewals"
"""An annotation that differs between renewals: the API server does not store an unchanged object."""

FLEET_CHARS_MAX = 63
_PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_FLEET = re.compile(rf"{_PART}(_{_PART})*")


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    """An owner of an object: Kubernetes deletes the object after its owner."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class OwnerPod:
    """The pod in which a worker runs: Kubernetes deletes the objects that it owns after it."""

    name: str
    uid: str

    def reference(self) -> OwnerReference:
        """Return the owner reference of this pod."""
        return OwnerReference("v1", "Pod", self.name, self.uid)


class Metadata(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of an object that are read and written."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None


class StoredObject(msgspec.Struct, frozen=True, rename="camel"):
    """One object. ``spec`` is the record in the JSON of every store."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")


def checked_fleet(namespace: str) -> str:
    """Return ``namespace``; raise ConfigError unless it can be part of an object's name."""
    if len(checked_namespace(namespace)) > FLEET_CHARS_MAX or not _FLEET.fullmatch(namespace):
        raise ConfigError(
            f"namespace: with --discovery kubernetes 1 to {FLEET_CHARS_MAX} lower-case letters, digits and "
            f"'-', and '_' between two of the former, not {namespace[:80]!r}",
            param="namespace",
        )
    return namespace


def encode_object(
    resource: ResourceKind,
    name: str,
    spec: bytes,
    *,
    fleet: str,
    renewals: int = 0,
    replaces: str = "",
    owners: tuple[OwnerReference, ...] = (),
) -> bytes:
    """Return the object of a record as JSON. ``replaces`` is the resourceVersion that it replaces."""
    metadata = Metadata(
        name=name,
        resource_version=replaces,
        labels={FLEET_LABEL: fleet},
        annotations={RENEWALS_ANNOTATION: str(renewals)},
        owner_references=owners,
    )
    return msgspec.json.encode(StoredObject(resource.api_version, resource.name, metadata, msgspec.Raw(spec)))
