"""Applies a plan: server-side apply where objects differ, deletion where they are no longer planned."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.kube.client import KubeClient, RequestRefused, collected_warnings
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import (
    CORDONS,
    Key,
    Manifest,
    ResourceKind,
    fields_of,
    key_of,
    labels_of,
    metadata_of,
    objects_in,
    uid_of,
    version_of,
)
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, DEPLOYMENT_LABEL, MANAGER

WORKLOADS = ResourceKind("apps/v1", "Deployment", "deployments")
SERVICES = ResourceKind("v1", "Service", "services")
ACCOUNTS = ResourceKind("v1", "ServiceAccount", "serviceaccounts")
ROLES = ResourceKind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDINGS = ResourceKind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
BUDGETS = ResourceKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES = ResourceKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
OWNED = (WORKLOADS, SERVICES, ACCOUNTS, ROLES, ROLE_BINDINGS, BUDGETS, NETWORK_POLICIES, CORDONS)
"""The kinds of objects that a plan may contain."""


OWNER_LABELS = ("app.kubernetes.io/managed-by", DEPLOYMENT_LABEL, COMPONENT_LABEL)
"""Labels that name the deployment, and the component of it, that an object belongs to."""

HOLDER = "kvrouter-operator-replicas"
"""The field manager of replicas after the operator has given them up, until a client scales."""


class ObjectRef(NamedTuple):
    """A reference to one object: its kind and key."""

    kind: str
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key.name}"


class RefusedWrite(NamedTuple):
    """A write that the API server refused, and its message. ``is_lasting``: it is refused until somebody
    changes something.
    """

    ref: ObjectRef
    message: str
    is_lasting: bool = True

    def __str__(self) -> str:
        return f"{self.ref}: {self.message}"


@dataclass(slots=True)
class Changes:
    """The result of applying a plan. ``adopted`` are objects that an earlier deployment of the same name left
    behind, ``awaiting_gc`` those of a deleted one, which Kubernetes deletes after it; ``taken`` are places
    with an object of another owner, ``refused`` are refused writes, ``set_back`` workloads that a client had
    scaled though the unchanged plan states their number; ``warned`` are the API server's warnings about
    writes, with their objects.
    """

    created: list[ObjectRef] = field(default_factory=list)
    adopted: list[ObjectRef] = field(default_factory=list)
    changed: list[ObjectRef] = field(default_factory=list)
    removed: list[ObjectRef] = field(default_factory=list)
    awaiting_gc: list[ObjectRef] = field(default_factory=list)
    taken: list[ObjectRef] = field(default_factory=list)
    refused: list[RefusedWrite] = field(default_factory=list)
    set_back: list[ObjectRef] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    @property
    def done(self) -> dict[str, list[ObjectRef]]:
        """The written objects, by what was done with them; kinds of changes without objects are left out."""
        every = {
            "created": self.created,
            "adopted": self.adopted,
            "changed": self.changed,
            "removed": self.removed,
        }
        return {change: refs for change, refs in every.items() if refs}


class _WriteResult(NamedTuple):
    """The digest of an applied manifest, and the uid and the stamp of the object that it became."""

    digest: bytes
    uid: str
    stamp: str

    def is_current(self, current: Manifest, digest: bytes) -> bool:
        """Whether an object is as it was written, or a watch does not show the write yet."""
        if (self.digest, self.uid) != (digest, uid_of(current)):
            return False
        return self.is_ahead_of(current) or _stamp(current) == self.stamp

    def is_ahead_of(self, current: Manifest) -> bool:
        """Whether a watch does not show the last write of an object yet."""
        generation = metadata_of(current).get("generation")
        return isinstance(generation, int) and self.stamp.isdigit() and generation < int(self.stamp)


class Applier:
    """Applies plans. It does not write again what it wrote and no client has changed since."""

    def __init__(self, client: KubeClient, owned: Mapping[ResourceKind, Informer[str]]) -> None:
        self._client = client
        self._owned = owned
        self._written: dict[Key, dict[ObjectRef, _WriteResult]] = {}

    def knows(self, kind: ResourceKind) -> bool:
        """Return whether the objects of a kind were listed: it may not be installed, or not be readable."""
        return self._owned[kind].synced.is_set()

    def objects_of(self, owner: Manifest, kind: ResourceKind) -> list[Manifest]:
        """Return a deployment's objects of a kind, in its own namespace only: any client can write a uid.

        An object that a watch shows as it was before the last write gets the written generation, which its
        controller has not observed: else its old status would count for the new spec.
        """
        written = self._written.get(key_of(owner), {})
        return [
            _of_generation(each, written.get(ObjectRef(kind.name, key_of(each))))
            for each in self._of(key_of(owner).namespace, uid_of(owner), kind)
        ]

    async def apply(
        self,
        owner: Key,
        owner_uid: str,
        manifests: Sequence[Manifest],
        *,
        kept: Collection[ResourceKind] = (),
        held: Collection[str] = (),
    ) -> Changes:
        """Make the deployment's objects be ``manifests``. Objects of the ``kept`` kinds and of the ``held``
        components are not removed.

        A refused write holds up no other write; but after one only cordons are removed: an existing object
        may serve in its place.

        Raises ClusterError when the API server does not answer, or is to be asked again at once.
        """
        changes = Changes()
        before = self._written.get(owner, {})
        self._written[owner] = {}
        for manifest in manifests:
            ref = ObjectRef(kind_of(manifest).name, key_of(manifest))
            with _collecting_refusals(changes, ref):
                await self._apply_one(owner, owner_uid, manifest, before.get(ref), changes)
        if changes.refused:  # a removed cordon needs no object in its place
            kept = {*kept, *(kind for kind in self._owned if kind != CORDONS)}
        planned = {ObjectRef(str(manifest["kind"]), key_of(manifest)) for manifest in manifests}
        await self._prune(owner, owner_uid, planned, changes, kept, held)
        return changes

    async def _apply_one(
        self, owner: Key, owner_uid: str, manifest: Manifest, known: _WriteResult | None, changes: Changes
    ) -> None:
        kind = kind_of(manifest)
        ref = ObjectRef(kind.name, key_of(manifest))
        current = self._owned[kind].get(ref.key) or await self._client.read(kind, ref.key)
        is_adopted = False
        if current is not None and owner_uid_of(current) != owner_uid:
            current = await self._client.read(kind, ref.key)  # a watch may be behind
            is_own = current is not None and _has_lost_owner(current, known)
            is_adopted = current is not None and not is_own and is_orphan(current, manifest)
            if current is not None and owner_uid_of(current) != owner_uid and not (is_own or is_adopted):
                (changes.awaiting_gc if _is_of_predecessor(current, manifest) else changes.taken).append(ref)
                return
        if kind.name == "RoleBinding" and ObjectRef("ServiceAccount", ref.key) in changes.taken:
            return  # somebody else's account gets no rights
        digest = _digest(manifest)
        has_metadata = current is not None and _has_metadata(current, manifest)
        if current is not None and known is not None and has_metadata and known.is_current(current, digest):
            self._written[owner][ref] = known
            return
        if kind == WORKLOADS and current is not None and stated_replicas(manifest) is None:
            await release_replicas(self._client, kind, manifest)
        if known is not None and known.digest == digest and _is_scaled(current, manifest):
            changes.set_back.append(ref)
        with collected_warnings() as warned:
            now = await self._client.apply(
                kind, manifest if current is None else _with_uid(manifest, uid_of(current))
            )
        changes.warned += [f"{ref}: {text}" for text in warned]
        self._written[owner][ref] = _WriteResult(digest, uid_of(now), _stamp(now))
        if current is None:
            changes.created.append(ref)
        elif is_adopted:
            changes.adopted.append(ref)
        elif _stamp(now) != _stamp(current) or (not has_metadata and _has_metadata(now, manifest)):
            changes.changed.append(ref)

    def forget(self, owner: Key | None = None) -> None:
        """Write everything again the next time, of one deployment or of all."""
        if owner is None:
            self._written.clear()
        else:
            self._written.pop(owner, None)

    def _of(self, namespace: str, owner_uid: str, kind: ResourceKind) -> list[Manifest]:
        return [each for each in self._owned[kind].of_group(owner_uid) if key_of(each).namespace == namespace]

    async def _prune(
        self,
        owner: Key,
        owner_uid: str,
        planned: set[ObjectRef],
        changes: Changes,
        kept: Collection[ResourceKind],
        held: Collection[str],
    ) -> None:
        for kind in self._owned:
            if kind in kept:
                continue
            for manifest in self._of(owner.namespace, owner_uid, kind):
                ref = ObjectRef(kind.name, key_of(manifest))
                if ref in planned or metadata_of(manifest).get("deletionTimestamp"):
                    continue
                if _component_of(manifest) in held:
                    continue
                with _collecting_refusals(changes, ref):
                    await self._client.delete(kind, ref.key, uid=uid_of(manifest))
                    changes.removed.append(ref)


def _of_generation(current: Manifest, known: _WriteResult | None) -> Manifest:
    if known is None or known.uid != uid_of(current) or not known.is_ahead_of(current):
        return current
    return {**current, "metadata": {**metadata_of(current), "generation": int(known.stamp)}}


def _component_of(manifest: Manifest) -> JsonValue:
    return labels_of(manifest).get(COMPONENT_LABEL)


@contextmanager
def _collecting_refusals(changes: Changes, ref: ObjectRef) -> Iterator[None]:
    """Add a lasting refusal of the write inside to ``changes``; raise a passing one."""
    try:
        yield
    except RequestRefused as refused:
        if refused.is_passing:
            raise
        changes.refused.append(RefusedWrite(ref, refused.detail, refused.is_lasting))


def owner_uid_of(manifest: Manifest) -> str:
    """Return the uid of an object's controller; empty without one."""
    owner = _controller_of(manifest)
    return "" if owner is None else str(owner.get("uid"))


def _controller_of(manifest: Manifest) -> Manifest | None:
    owners = objects_in(metadata_of(manifest).get("ownerReferences"))
    return next((owner for owner in owners if owner.get("controller")), None)


def _is_of_predecessor(current: Manifest, manifest: Manifest) -> bool:
    """Whether an object's owner has the name of that of ``manifest`` and another uid: it was deleted, since
    names are unique, and its objects are deleted after it.
    """
    was, is_now = _controller_of(current), _controller_of(manifest)
    if was is None or is_now is None or not was.get("name"):
        return False
    groups = [str(owner.get("apiVersion")).partition("/")[0] for owner in (was, is_now)]
    return groups[0] == groups[1] and all(was.get(part) == is_now.get(part) for part in ("kind", "name"))


def _has_lost_owner(current: Manifest, known: _WriteResult | None) -> bool:
    """Whether an object is the one that was written for this deployment, and has no controller now."""
    is_leaving = metadata_of(current).get("deletionTimestamp")
    return known is not None and known.uid == uid_of(current) and not (is_leaving or owner_uid_of(current))


def _has_metadata(current: Manifest, manifest: Manifest) -> bool:
    """Whether an object has all planned labels, annotations and owners; it may have others."""
    has, planned = metadata_of(current), metadata_of(manifest)
    owners, wanted = (objects_in(metadata.get("ownerReferences")) for metadata in (has, planned))
    return all(_includes(has.get(part), planned.get(part)) for part in ("labels", "annotations")) and all(
        any(_includes(owner, each) for owner in owners) for each in wanted
    )


def _includes(has: JsonValue, planned: JsonValue) -> bool:
    """Whether an object has every planned field with the planned value."""
    return all(fields_of(has).get(name) == value for name, value in fields_of(planned).items())


def is_orphan(current: Manifest, manifest: Manifest) -> bool:
    """Whether an object was left behind by a deployment of the same name that was deleted with
    ``--cascade=orphan``: it has no controller, it has the owner labels of ``manifest``, and an operator wrote
    it.
    """
    metadata = metadata_of(current)
    if owner_uid_of(current) or metadata.get("deletionTimestamp"):
        return False
    labels, wanted = labels_of(current), labels_of(manifest)
    if any(labels.get(key) != wanted.get(key) for key in OWNER_LABELS):
        return False
    return any(
        (entry.get("manager"), entry.get("operation")) == (MANAGER, "Apply")
        for entry in objects_in(metadata.get("managedFields"))
    )


async def release_replicas(client: KubeClient, kind: ResourceKind, manifest: Manifest) -> None:
    """Keep the number of pods when ``manifest``, which states none, is applied.

    Server-side apply removes a field that its only owner no longer states, which leaves one pod: so another
    manager takes it first. Raises ClusterError; RequestRefused with 409 if it is scaled at that moment.
    """
    current = await client.read(kind, key_of(manifest))
    replicas = None if current is None else stated_replicas(current)
    if current is None or replicas is None or not is_held_alone(current):
        return
    metadata: Manifest = {
        **{part: metadata_of(current)[part] for part in ("namespace", "name")},
        "uid": uid_of(current),
        "resourceVersion": version_of(current),
    }
    held: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }
    await client.claim(kind, held, manager=HOLDER)


def stated_replicas(manifest: Manifest) -> int | None:
    """Return a manifest's ``spec.replicas``; None if it is not an integer."""
    replicas = fields_of(manifest.get("spec")).get("replicas")
    return replicas if isinstance(replicas, int) else None


def is_held_alone(manifest: Manifest) -> bool:
    """Whether the operator is the only field manager of the number of pods."""
    return holders_of(manifest, "replicas") == {(MANAGER, "Apply")}


def holders_of(manifest: Manifest, field: str) -> set[tuple[str, str]]:
    """Return the field managers of a field of the spec, with their operations."""
    return {
        (str(entry.get("manager")), str(entry.get("operation")))
        for entry in objects_in(metadata_of(manifest).get("managedFields"))
        if f"f:{field}" in fields_of(fields_of(entry.get("fieldsV1")).get("f:spec"))
    }


def kind_of(manifest: Manifest) -> ResourceKind:
    """Return the kind of a planned manifest."""
    named = (manifest.get("apiVersion"), manifest.get("kind"))
    for kind in OWNED:
        if (kind.api_version, kind.name) == named:
            return kind
    raise ValueError(f"{named} is not among the kinds that are owned: {', '.join(map(str, OWNED))}")


def _is_scaled(current: Manifest | None, planned: Manifest) -> bool:
    """Whether the current object has another number of pods than is planned."""
    stated = stated_replicas(planned)
    return current is not None and stated is not None and stated_replicas(current) != stated


def _stamp(manifest: Manifest) -> str:
    """Return a value that changes with an object's spec; with its status too if it has no generation."""
    generation = metadata_of(manifest).get("generation")
    return version_of(manifest) if generation is None else str(generation)


def _with_uid(manifest: Manifest, uid: str) -> Manifest:
    """Return ``manifest`` for the object with this uid: the API server refuses it (409) for another one."""
    return {**manifest, "metadata": {**metadata_of(manifest), "uid": uid}}


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()
