"""A record of a fleet as an object of Kubernetes, and back."""

import re
from dataclasses import dataclass
from datetime import datetime

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.kube.objects import FLEET_LABEL, ResourceKind
from kvrouter.transports.discovery.wire import checked_namespace

RENEWALS_ANNOTATION = "kvrouter.dev/renewals"
"""Differs from one renewal to the next: an object that is written as it was is not written at all."""

FLEET_CHARS_MAX = 63
_PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_FLEET = re.compile(rf"{_PART}(_{_PART})*")


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    """Whose end is the end of an object, too."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class OwnerPod:
    """The pod in which a worker runs: once it is gone, Kubernetes deletes what it owns."""

    name: str
    uid: str

    def reference(self) -> OwnerReference:
        """Return how an object names it as its owner."""
        return OwnerReference("v1", "Pod", self.name, self.uid)


class Metadata(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What is read of an object's metadata, and written."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None


class StoredObject(msgspec.Struct, frozen=True, rename="camel"):
    """One object. ``spec`` is the record as every store keeps it."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")


def checked_fleet(namespace: str) -> str:
    """Return ``namespace``; raise ConfigError for one that cannot be in the name of an object."""
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
    """Return the object of a record as JSON. ``replaces`` is the version that it is written over."""
    metadata = Metadata(
        name=name,
        resource_version=replaces,
        labels={FLEET_LABEL: fleet},
        annotations={RENEWALS_ANNOTATION: str(renewals)},
        owner_references=owners,
    )
    return msgspec.json.encode(StoredObject(resource.api_version, resource.name, metadata, msgspec.Raw(spec)))
