"""A worker's record as an object of Kubernetes, and back."""

import re
from dataclasses import dataclass

import msgspec

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.kube.client import decoded
from kvrouter.kube.objects import FLEET_LABEL, WORKERS, WatchEvent
from kvrouter.transports.discovery.wire import CardRecord, checked_namespace, decode_record, encode_record

RENEWALS_ANNOTATION = "kvrouter.dev/renewals"
"""Differs from one renewal to the next: an object that is written as it was is not written at all."""

FLEET_CHARS_MAX = 63
_PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_FLEET = re.compile(rf"{_PART}(_{_PART})*")
_NAME = re.compile(r"(?P<fleet>.+)-(?P<worker>0|[1-9][0-9]{0,18})")


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


class WorkerObject(msgspec.Struct, frozen=True, rename="camel"):
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


def name_of(fleet: str, worker_id: WorkerId) -> str:
    """Return the name of a worker's object, which has a ``.`` where its fleet's has a ``_``."""
    return f"{_written(fleet)}-{worker_id}"


def _written(fleet: str) -> str:
    """No fleet's name has a ``.``, so no two are written alike."""
    return fleet.replace("_", ".")


def encode_object(
    record: CardRecord,
    *,
    fleet: str,
    renewals: int = 0,
    replaces: str | None = None,
    owners: tuple[OwnerReference, ...] = (),
) -> bytes:
    """Return the object of ``record`` as JSON. ``replaces`` is the version that it is written over."""
    metadata = Metadata(
        name=name_of(fleet, record.card.worker_id),
        resource_version=replaces or "",
        labels={FLEET_LABEL: fleet},
        annotations={RENEWALS_ANNOTATION: str(renewals)},
        owner_references=owners,
    )
    spec = msgspec.Raw(encode_record(record))
    return msgspec.json.encode(WorkerObject(WORKERS.api_version, WORKERS.name, metadata, spec))


def decoded_event(event: WatchEvent) -> WorkerObject:
    """Return the object that an event is about. Raises ClusterLost for one that is none of ours."""
    return decoded(bytes(event.object), WorkerObject)


def worker_of(found: WorkerObject, *, fleet: str) -> WorkerId | None:
    """Return whose object it is, by its name; None for a name that no worker has."""
    named = _NAME.fullmatch(found.metadata.name)
    return None if named is None or named["fleet"] != _written(fleet) else WorkerId(int(named["worker"]))


def record_of(found: WorkerObject, *, fleet: str) -> CardRecord:
    """Return the record in an object. Raises ProtocolError that names what makes it none."""
    worker_id = worker_of(found, fleet=fleet)
    if worker_id is None:
        raise ProtocolError(f"its name is not {_written(fleet)}-<worker id>", param="worker_id")
    record = decode_record(bytes(found.spec))
    if record.card.worker_id != worker_id:
        raise ProtocolError(f"holds the card of worker {record.card.worker_id}", param="worker_id")
    return record
