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
"""The kinds that plans have manifests of."""


OWNER_LABELS = ("app.kubernetes.io/managed-by", DEPLOYMENT_LABEL, COMPONENT_LABEL)
"""Labels that say which deployment, and which component of it, an object is of."""

HOLDER = "kvrouter-operator-replicas"
"""The field manager that holds the number between the operator, which gives it up, and who scales first."""


class ObjectRef(NamedTuple):
    """One object among those of all kinds."""

    kind: str
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key.name}"


class RefusedWrite(NamedTuple):
    """A write that the API server did not take, and its words. ``is_lasting``: somebody has to change
    something before it does.
    """

    place: ObjectRef
    said: str
    is_lasting: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.said}"


@dataclass(slots=True)
class Changes:
    """What was done. ``adopted`` are objects that a deployment of the same name had left behind,
    ``awaiting_gc`` those of one that was deleted, which Kubernetes deletes after it; ``taken`` are places
    where something is that this deployment does not own, ``refused`` are writes that the API server did not
    take, ``set_back`` workloads that somebody else had scaled though the plan, the same as before, states
    their number; ``warned`` is what the API server warns of in answers to writes, with their objects.
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
        """What was written, by what was done with it; nothing else has an entry."""
        every = {
            "created": self.created,
            "adopted": self.adopted,
            "changed": self.changed,
            "removed": self.removed,
        }
        return {change: places for change, places in every.items() if places}


class _WriteResult(NamedTuple):
    """What was applied, and what the server made of it."""

    digest: bytes
    uid: str
    stamp: str

    def is_current(self, there: Manifest, digest: bytes) -> bool:
        """Whether an object is as it was written, or a watch has not shown that yet."""
        if (self.digest, self.uid) != (digest, uid_of(there)):
            return False
        return self.is_ahead_of(there) or _stamp(there) == self.stamp

    def is_ahead_of(self, there: Manifest) -> bool:
        """Whether a watch has not shown yet what was written of an object."""
        generation = metadata_of(there).get("generation")
        return isinstance(generation, int) and self.stamp.isdigit() and generation < int(self.stamp)


class Applier:
    """Writes plans. What it wrote, and nobody changed since, it does not write again."""

    def __init__(self, cluster: KubeClient, owned: Mapping[ResourceKind, Informer[str]]) -> None:
        self._cluster = cluster
        self._owned = owned
        self._written: dict[Key, dict[ObjectRef, _WriteResult]] = {}

    def knows(self, kind: ResourceKind) -> bool:
        """Whether the objects of a kind have been listed: it may not be installed, or not be ours to read."""
        return self._owned[kind].synced.is_set()

    def objects_of(self, owner: Manifest, kind: ResourceKind) -> list[Manifest]:
        """Return what a deployment owns of a kind, in its own namespace alone: anybody can write a uid.

        What a watch has not shown yet as it was written is of the written generation, which its controller
        has not seen: else its last status would count for what was just written.
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
        """Make what the deployment owns be ``manifests``; of the kinds that are ``kept`` nothing is removed,
        nor of the components that are ``held``.

        A write that is refused holds up no other one; but while one is, nothing but cordons is removed: what
        is there may serve in its place.

        Raises ClusterError when the API server cannot be asked, or is to be asked again at once.
        """
        changes = Changes()
        before = self._written.get(owner, {})
        self._written[owner] = {}
        for manifest in manifests:
            place = ObjectRef(kind_of(manifest).name, key_of(manifest))
            with _collecting_refusals(changes, place):
                await self._apply_one(owner, owner_uid, manifest, before.get(place), changes)
        if changes.refused:  # a cordon that is taken back has nothing that may serve in its place
            kept = {*kept, *(kind for kind in self._owned if kind != CORDONS)}
        planned = {ObjectRef(str(manifest["kind"]), key_of(manifest)) for manifest in manifests}
        await self._prune(owner, owner_uid, planned, changes, kept, held)
        return changes

    async def _apply_one(
        self, owner: Key, owner_uid: str, manifest: Manifest, known: _WriteResult | None, changes: Changes
    ) -> None:
        kind = kind_of(manifest)
        place = ObjectRef(kind.name, key_of(manifest))
        there = self._owned[kind].get(place.key) or await self._cluster.read(kind, place.key)
        is_adopted = False
        if there is not None and owner_uid_of(there) != owner_uid:
            there = await self._cluster.read(kind, place.key)  # a watch may be behind
            is_own = there is not None and _has_lost_owner(there, known)
            is_adopted = there is not None and not is_own and is_orphan(there, manifest)
            if there is not None and owner_uid_of(there) != owner_uid and not (is_own or is_adopted):
                (changes.awaiting_gc if _is_of_predecessor(there, manifest) else changes.taken).append(place)
                return
        if kind.name == "RoleBinding" and ObjectRef("ServiceAccount", place.key) in changes.taken:
            return  # somebody else's account gets no rights
        digest = _digest(manifest)
        has_metadata = there is not None and _has_metadata(there, manifest)
        if there is not None and known is not None and has_metadata and known.is_current(there, digest):
            self._written[owner][place] = known
            return
        if kind == WORKLOADS and there is not None and stated_replicas(manifest) is None:
            await release_replicas(self._cluster, kind, manifest)
        if known is not None and known.digest == digest and _is_scaled(there, manifest):
            changes.set_back.append(place)
        with collected_warnings() as warned:
            now = await self._cluster.apply(
                kind, manifest if there is None else _with_uid(manifest, uid_of(there))
            )
        changes.warned += [f"{place}: {text}" for text in warned]
        self._written[owner][place] = _WriteResult(digest, uid_of(now), _stamp(now))
        if there is None:
            changes.created.append(place)
        elif is_adopted:
            changes.adopted.append(place)
        elif _stamp(now) != _stamp(there) or (not has_metadata and _has_metadata(now, manifest)):
            changes.changed.append(place)

    def forget(self, owner: Key | None = None) -> None:
        """Write everything again the next time; of one deployment, or of all."""
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
                place = ObjectRef(kind.name, key_of(manifest))
                if place in planned or metadata_of(manifest).get("deletionTimestamp"):
                    continue
                if _component_of(manifest) in held:
                    continue
                with _collecting_refusals(changes, place):
                    await self._cluster.delete(kind, place.key, uid=uid_of(manifest))
                    changes.removed.append(place)


def _of_generation(there: Manifest, known: _WriteResult | None) -> Manifest:
    if known is None or known.uid != uid_of(there) or not known.is_ahead_of(there):
        return there
    return {**there, "metadata": {**metadata_of(there), "generation": int(known.stamp)}}


def _component_of(manifest: Manifest) -> JsonValue:
    return labels_of(manifest).get(COMPONENT_LABEL)


@contextmanager
def _collecting_refusals(changes: Changes, place: ObjectRef) -> Iterator[None]:
    """A write within that is refused, and will be again, is among ``changes``."""
    try:
        yield
    except RequestRefused as refused:
        if refused.is_passing:
            raise
        changes.refused.append(RefusedWrite(place, refused.detail, refused.is_lasting))


def owner_uid_of(manifest: Manifest) -> str:
    """Return the uid of the object that controls this one; empty when none does."""
    owner = _controller_of(manifest)
    return "" if owner is None else str(owner.get("uid"))


def _controller_of(manifest: Manifest) -> Manifest | None:
    owners = objects_in(metadata_of(manifest).get("ownerReferences"))
    return next((owner for owner in owners if owner.get("controller")), None)


def _is_of_predecessor(there: Manifest, manifest: Manifest) -> bool:
    """Whether an object's owner has the name of that of ``manifest`` and another uid: it was deleted, since a
    name is given once, and its objects are deleted after it.
    """
    was, is_now = _controller_of(there), _controller_of(manifest)
    if was is None or is_now is None or not was.get("name"):
        return False
    groups = [str(owner.get("apiVersion")).partition("/")[0] for owner in (was, is_now)]
    return groups[0] == groups[1] and all(was.get(part) == is_now.get(part) for part in ("kind", "name"))


def _has_lost_owner(there: Manifest, known: _WriteResult | None) -> bool:
    """Whether an object is the very one that was written for this deployment, and nobody controls it now."""
    is_leaving = metadata_of(there).get("deletionTimestamp")
    return known is not None and known.uid == uid_of(there) and not (is_leaving or owner_uid_of(there))


def _has_metadata(there: Manifest, manifest: Manifest) -> bool:
    """Whether an object has all the labels, annotations and owners that are planned; it may have others."""
    has, planned = metadata_of(there), metadata_of(manifest)
    owners, wanted = (objects_in(metadata.get("ownerReferences")) for metadata in (has, planned))
    return all(_includes(has.get(part), planned.get(part)) for part in ("labels", "annotations")) and all(
        any(_includes(owner, each) for owner in owners) for each in wanted
    )


def _includes(has: JsonValue, planned: JsonValue) -> bool:
    """Whether an object has every field that is planned of it, with that value."""
    return all(fields_of(has).get(name) == value for name, value in fields_of(planned).items())


def is_orphan(there: Manifest, manifest: Manifest) -> bool:
    """Whether an object is what a deployment left behind that was deleted with ``--cascade=orphan``, where
    ``manifest`` of one of the same name belongs: nobody controls it, it says whose it was, and an operator
    wrote it.
    """
    metadata = metadata_of(there)
    if owner_uid_of(there) or metadata.get("deletionTimestamp"):
        return False
    labels, wanted = labels_of(there), labels_of(manifest)
    if any(labels.get(key) != wanted.get(key) for key in OWNER_LABELS):
        return False
    return any(
        (entry.get("manager"), entry.get("operation")) == (MANAGER, "Apply")
        for entry in objects_in(metadata.get("managedFields"))
    )


async def release_replicas(cluster: KubeClient, kind: ResourceKind, manifest: Manifest) -> None:
    """See that the number of pods stays when ``manifest``, which states none, is applied.

    Server-side apply removes a field that its only owner no longer states, and one pod is what is left then:
    so another manager holds it first. Raises ClusterError; Refused with 409 when it is scaled at that moment.
    """
    there = await cluster.read(kind, key_of(manifest))
    replicas = None if there is None else stated_replicas(there)
    if there is None or replicas is None or not is_held_alone(there):
        return
    metadata: Manifest = {
        **{part: metadata_of(there)[part] for part in ("namespace", "name")},
        "uid": uid_of(there),
        "resourceVersion": version_of(there),
    }
    held: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }
    await cluster.claim(kind, held, manager=HOLDER)


def stated_replicas(manifest: Manifest) -> int | None:
    """Return the number of pods that a manifest states; None where it states none."""
    replicas = fields_of(manifest.get("spec")).get("replicas")
    return replicas if isinstance(replicas, int) else None


def is_held_alone(manifest: Manifest) -> bool:
    """Whether the operator holds the number of pods, and nobody else does."""
    holders = {
        (str(entry.get("manager")), str(entry.get("operation")))
        for entry in objects_in(metadata_of(manifest).get("managedFields"))
        if "f:replicas" in fields_of(fields_of(entry.get("fieldsV1")).get("f:spec"))
    }
    return holders == {(MANAGER, "Apply")}


def kind_of(manifest: Manifest) -> ResourceKind:
    """Return the kind of a planned manifest."""
    named = (manifest.get("apiVersion"), manifest.get("kind"))
    for kind in OWNED:
        if (kind.api_version, kind.name) == named:
            return kind
    raise ValueError(f"{named} is not among the kinds that are owned: {', '.join(map(str, OWNED))}")


def _is_scaled(there: Manifest | None, planned: Manifest) -> bool:
    """Whether what is there has another number of pods than is planned."""
    stated = stated_replicas(planned)
    return there is not None and stated is not None and stated_replicas(there) != stated


def _stamp(manifest: Manifest) -> str:
    """What changes with an object's spec and, where the server distinguishes the two, not with its status."""
    generation = metadata_of(manifest).get("generation")
    return version_of(manifest) if generation is None else str(generation)


def _with_uid(manifest: Manifest, uid: str) -> Manifest:
    """``manifest`` for the object of this uid alone: the API server refuses it (409) for another one."""
    return {**manifest, "metadata": {**metadata_of(manifest), "uid": uid}}


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()
