"""What a deployment owns, and what is only made to look so."""

from collections.abc import Mapping
from typing import cast

import pytest
from pydantic import JsonValue

from kvrouter.kube.client import KubeClient, RequestRefused
from kvrouter.kube.informer import Informer
from kvrouter.kube.objects import CORDONS, Key, Manifest, ResourceKind, key_of, metadata_of
from kvrouter.operator.api.deployment import KIND
from kvrouter.operator.reconcile.apply import OWNED, WORKLOADS, Applier, ObjectRef

UID = "uid-of-llm"
LLM: Manifest = {"metadata": {"namespace": "team", "name": "llm", "uid": UID}}


class Objects:
    """A cluster of a few objects, as it is asked and as it is watched."""

    def __init__(self, *there: Manifest) -> None:
        self.there = {(str(each["kind"]), key_of(each)): each for each in there}
        self.deleted: list[ObjectRef] = []
        self.refuses: dict[str, int] = {}

    def watched(self) -> Mapping[ResourceKind, Informer[str]]:
        return cast(Mapping[ResourceKind, Informer[str]], {kind: _OfKind(self, kind.name) for kind in OWNED})

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        return self.there.get((kind.name, key))

    async def apply(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        status = self.refuses.get(key_of(manifest).name)
        if status is not None:
            raise RequestRefused(f"PATCH /{kind.plural}: no", status=status, detail="no")
        self.there[kind.name, key_of(manifest)] = manifest
        return manifest

    async def delete(self, kind: ResourceKind, key: Key, *, uid: str) -> None:
        self.deleted.append(ObjectRef(kind.name, key))


class _OfKind:
    def __init__(self, objects: Objects, kind: str) -> None:
        self._objects, self._kind = objects, kind

    def get(self, key: Key) -> Manifest | None:
        return self._objects.there.get((self._kind, key))

    def of_group(self, owner_uid: str) -> list[Manifest]:
        found = [each for (kind, _), each in self._objects.there.items() if kind == self._kind]
        return [each for each in found if owner_uid in str(metadata_of(each).get("ownerReferences"))]


def owned(kind: str, name: str, *, api: str, namespace: str = "team", uid: str = UID) -> Manifest:
    owner: JsonValue = {"apiVersion": "nvidia.com/v1beta1", "kind": KIND, "uid": uid, "controller": True}
    metadata: Manifest = {"namespace": namespace, "name": name, "uid": f"of-{name}"}
    return {"apiVersion": api, "kind": kind, "metadata": {**metadata, "ownerReferences": [owner]}}


async def test_object_of_another_namespace_is_never_owned_whatever_uid_it_names() -> None:
    mine = owned("Deployment", "llm-decode", api="apps/v1")
    foreign = owned("Deployment", "forged", api="apps/v1", namespace="elsewhere")
    cluster = Objects(mine, foreign)
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    assert applied.objects_of(LLM, WORKLOADS) == [mine]
    changes = await applied.apply(Key("team", "llm"), UID, [])
    assert changes.removed == cluster.deleted == [ObjectRef("Deployment", Key("team", "llm-decode"))]


async def test_foreign_service_account_gets_no_role_binding() -> None:
    taken = owned("ServiceAccount", "llm-workers", api="v1", uid="of-another")
    cluster = Objects(taken)
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    rbac = "rbac.authorization.k8s.io/v1"
    wanted = [
        owned("ServiceAccount", "llm-workers", api="v1"),
        owned("Role", "llm-workers", api=rbac),
        owned("RoleBinding", "llm-workers", api=rbac),
        owned("RoleBinding", "llm-frontends", api=rbac),
    ]
    changes = await applied.apply(Key("team", "llm"), UID, wanted)
    assert changes.taken == [ObjectRef("ServiceAccount", Key("team", "llm-workers"))]
    assert [str(place) for place in changes.created] == ["Role llm-workers", "RoleBinding llm-frontends"]


async def test_refused_write_blocks_no_other_write_and_blocks_removals() -> None:
    old = owned("Deployment", "llm-old", api="apps/v1")
    cluster = Objects(old)
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    wanted = [owned("Deployment", f"llm-{name}", api="apps/v1") for name in ("a", "b", "c")]
    cluster.refuses = {"llm-b": 422}
    changes = await applied.apply(Key("team", "llm"), UID, wanted)
    assert [str(place) for place in changes.created] == ["Deployment llm-a", "Deployment llm-c"]
    assert [str(refused) for refused in changes.refused] == ["Deployment llm-b: no"]
    assert cluster.deleted == changes.removed == []
    cluster.refuses = {}
    changes = await applied.apply(Key("team", "llm"), UID, wanted)
    assert [str(place) for place in changes.removed] == ["Deployment llm-old"]


async def test_cordon_is_removed_even_while_another_write_is_refused() -> None:
    cordon = owned("KvrouterCordon", "llm-node", api="kvrouter.dev/v1alpha1")
    old = owned("Deployment", "llm-old", api="apps/v1")
    cluster = Objects(old, cordon)
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    cluster.refuses = {"llm-b": 422}
    refused = owned("Deployment", "llm-b", api="apps/v1")
    await applied.apply(Key("team", "llm"), UID, [refused, cordon])
    assert cluster.deleted == []
    await applied.apply(Key("team", "llm"), UID, [refused], kept=(CORDONS,))
    assert cluster.deleted == []
    changes = await applied.apply(Key("team", "llm"), UID, [refused])
    assert [str(place) for place in changes.removed] == ["KvrouterCordon llm-node"]


@pytest.mark.parametrize("status", [409, 429, 503, 504])
async def test_transient_refusal_raises_instead_of_being_recorded(status: int) -> None:
    cluster = Objects()
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    cluster.refuses = {"llm-a": status}
    with pytest.raises(RequestRefused):
        await applied.apply(Key("team", "llm"), UID, [owned("Deployment", "llm-a", api="apps/v1")])


class Uids(Objects):
    """A cluster that takes no write about an object of another uid, as an API server does."""

    async def apply(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        there = self.there.get((kind.name, key_of(manifest)))
        if metadata_of(manifest).get("uid") not in (None, there and metadata_of(there)["uid"]):
            raise RequestRefused("uid mismatch", status=409)
        return await super().apply(kind, manifest)


async def test_object_replaced_since_the_watch_showed_it_is_not_overwritten() -> None:
    mine = owned("Service", "llm-frontend", api="v1")
    strangers: Manifest = {**mine, "metadata": {"namespace": "team", "name": "llm-frontend", "uid": "other"}}
    wanted: Manifest = {**mine, "metadata": {**metadata_of(mine), "labels": {"a": "b"}}}
    del metadata_of(wanted)["uid"]
    server = Uids(strangers)
    applied = Applier(cast(KubeClient, server), Objects(mine).watched())
    with pytest.raises(RequestRefused):
        await applied.apply(Key("team", "llm"), UID, [wanted])
    assert list(server.there.values()) == [strangers]
    server = Uids(mine)
    applied = Applier(cast(KubeClient, server), server.watched())
    assert len((await applied.apply(Key("team", "llm"), UID, [wanted])).refused) == 0
    assert metadata_of(next(iter(server.there.values())))["labels"] == {"a": "b"}


class Generations(Objects):
    """A cluster that counts how often the spec of an object changed."""

    async def apply(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return self.put(manifest)

    def put(self, manifest: Manifest) -> Manifest:
        place = str(manifest["kind"]), key_of(manifest)
        before = self.there.get(place, {})
        count = cast(int, metadata_of(before).get("generation", 0)) + (before.get("spec") != manifest["spec"])
        self.there[place] = {**manifest, "metadata": {**metadata_of(manifest), "generation": count}}
        return self.there[place]


def scaled_to(replicas: int) -> Manifest:
    return {**owned("Deployment", "llm-decode", api="apps/v1"), "spec": {"replicas": replicas}}


async def test_object_behind_in_the_watch_has_the_generation_of_the_last_write() -> None:
    server, shown = Generations(), Generations()
    applied = Applier(cast(KubeClient, server), shown.watched())
    shown.put(scaled_to(3))
    for replicas in (3, 4):
        await applied.apply(Key("team", "llm"), UID, [scaled_to(replicas)])
    (there,) = applied.objects_of(LLM, WORKLOADS)
    assert (metadata_of(there)["generation"], there["spec"]) == (2, {"replicas": 3})
    shown.put(scaled_to(4))
    (there,) = applied.objects_of(LLM, WORKLOADS)
    assert (metadata_of(there)["generation"], there["spec"]) == (2, {"replicas": 4})


async def test_watch_behind_the_last_write_is_not_taken_for_external_scaling() -> None:
    server, shown = Generations(), Generations()
    applied = Applier(cast(KubeClient, server), shown.watched())
    for replicas in (3, 4):
        await applied.apply(Key("team", "llm"), UID, [scaled_to(replicas)])
    shown.put(scaled_to(3))
    assert (await applied.apply(Key("team", "llm"), UID, [scaled_to(4)])).set_back == []
    shown.put(scaled_to(4))
    shown.put(scaled_to(7))
    changes = await applied.apply(Key("team", "llm"), UID, [scaled_to(4)])
    assert [str(place) for place in changes.set_back] == ["Deployment llm-decode"]


LABELS: JsonValue = {
    "app.kubernetes.io/managed-by": "kvrouter-operator",
    "kvrouter.dev/deployment": "llm",
    "kvrouter.dev/component": "decode",
    "own": "too",
}
BY_US: JsonValue = {"manager": "kvrouter-operator", "operation": "Apply"}


def left_behind(**metadata: JsonValue) -> Manifest:
    """What ``--cascade=orphan`` leaves: all but its owner."""
    found = owned("Deployment", "llm-decode", api="apps/v1", uid="of-the-one-before")
    return {
        **found,
        "metadata": {
            **metadata_of(found),
            "ownerReferences": [],
            "labels": LABELS,
            "managedFields": [BY_US],
            **metadata,
        },
    }


def decode() -> Manifest:
    found = owned("Deployment", "llm-decode", api="apps/v1")
    return {**found, "metadata": {**metadata_of(found), "labels": LABELS}}


async def test_object_left_by_a_deployment_of_the_same_name_is_adopted() -> None:
    cluster = Objects(left_behind())
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    changes = await applied.apply(Key("team", "llm"), UID, [decode()])
    place = ObjectRef("Deployment", Key("team", "llm-decode"))
    assert (changes.adopted, changes.taken, changes.created) == ([place], [], [])
    assert changes.done == {"adopted": [place]}
    assert (await applied.apply(Key("team", "llm"), UID, [decode()])).done == {}


async def test_object_of_a_former_deployment_in_deletion_is_awaited_then_recreated() -> None:
    owner: JsonValue = {"apiVersion": "nvidia.com/v1beta1", "kind": KIND, "name": "llm", "controller": True}
    before: JsonValue = {**cast(dict[str, JsonValue], owner), "uid": "of-the-one-before"}
    now: JsonValue = {**cast(dict[str, JsonValue], owner), "uid": UID}
    wanted = decode()
    metadata_of(wanted)["ownerReferences"] = [now]
    cluster = Objects(left_behind(ownerReferences=[before]))
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    changes = await applied.apply(Key("team", "llm"), UID, [wanted])
    assert [str(place) for place in changes.awaiting_gc] == ["Deployment llm-decode"]
    assert (changes.taken, changes.done) == ([], {})
    cluster.there.clear()
    changes = await applied.apply(Key("team", "llm"), UID, [wanted])
    assert [str(place) for place in changes.created] == ["Deployment llm-decode"]
    assert changes.awaiting_gc == []


@pytest.mark.parametrize(
    "metadata",
    [
        {"ownerReferences": [{"kind": "Other", "uid": "of-another", "controller": True}]},
        {"managedFields": [{"manager": "kubectl", "operation": "Apply"}]},
        {"managedFields": [{"manager": "kvrouter-operator", "operation": "Update"}]},
        {"managedFields": []},
        {"labels": {}},
        {"labels": {**cast(dict[str, JsonValue], LABELS), "kvrouter.dev/deployment": "other"}},
        {"labels": {**cast(dict[str, JsonValue], LABELS), "kvrouter.dev/component": "prefill"}},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
async def test_object_with_another_owner_manager_or_label_is_not_adopted(
    metadata: dict[str, JsonValue],
) -> None:
    cluster = Objects(left_behind(**metadata))
    applied = Applier(cast(KubeClient, cluster), cluster.watched())
    changes = await applied.apply(Key("team", "llm"), UID, [decode()])
    assert [str(place) for place in changes.taken] == ["Deployment llm-decode"]
    assert changes.done == {}
