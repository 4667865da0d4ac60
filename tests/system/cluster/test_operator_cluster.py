"""The operator's own calls, watches and lease on a real API server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from kvrouter.kube import client
from kvrouter.kube.client import CONFLICT, GONE, ClusterError, ClusterLost, KubeClient, RequestRefused
from kvrouter.kube.informer import Informer
from kvrouter.kube.kubeconfig import LoaderConnection
from kvrouter.kube.lease import Leader, LeaseTimes
from kvrouter.kube.objects import LEASES, Key, Manifest, ResourceKind, WatchEvent, key_of, metadata_of, uid_of
from kvrouter.operator.cluster_info import Grove
from kvrouter.operator.reconcile.info_reader import read_cluster_info
from tests.testing.constants import SetConstants
from tests.testing.processes import eventually

pytestmark = pytest.mark.api_server

CONFIG_MAPS = ResourceKind("v1", "ConfigMap", "configmaps")
OURS = {"kvrouter.test/set": "ours"}
SOON = LeaseTimes(lease_s=6.0, renew_s=4.0, retry_s=0.2)
KEPT = LeaseTimes(lease_s=120.0, renew_s=90.0, retry_s=0.2)
"""One that a busy machine renews in time."""

WITHIN_S = 120.0


@pytest.fixture
def cluster(api: ApiClient) -> KubeClient:
    return KubeClient(LoaderConnection(api))


async def test_an_object_is_applied_changed_and_deleted_once(cluster: KubeClient, namespace: str) -> None:
    key = Key(namespace, "settings")
    assert await cluster.read(CONFIG_MAPS, key) is None
    first = await cluster.apply(CONFIG_MAPS, settings(key, "one"))
    again = await cluster.apply(CONFIG_MAPS, settings(key, "one"))
    assert metadata_of(again)["resourceVersion"] == metadata_of(first)["resourceVersion"]
    await cluster.merge(CONFIG_MAPS, key, {"data": {"more": "1"}})
    found = await cluster.read(CONFIG_MAPS, key)
    assert found is not None
    assert found["data"] == {"value": "one", "more": "1"}
    with pytest.raises(RequestRefused) as refused:
        await cluster.create(CONFIG_MAPS, settings(key, "two"))
    assert (refused.value.status, refused.value.reason) == (CONFLICT, "AlreadyExists")
    await cluster.delete(CONFIG_MAPS, key, uid="of-another-object")
    assert await cluster.read(CONFIG_MAPS, key) is not None
    for _ in range(2):
        await cluster.delete(CONFIG_MAPS, key, uid=uid_of(found))
    assert await cluster.read(CONFIG_MAPS, key) is None


async def test_a_list_of_several_pages_is_complete(
    cluster: KubeClient, namespace: str, set_constants: SetConstants
) -> None:
    set_constants(client, PAGE_OBJECTS=2)
    keys = {Key(namespace, f"settings-{i}") for i in range(5)}
    for key in keys:
        await cluster.apply(CONFIG_MAPS, settings(key, "one"))
    found = await cluster.find(CONFIG_MAPS, namespace=namespace, labels="kvrouter.test/set=ours")
    assert {key_of(manifest) for manifest in found.objects} == keys


async def test_an_unreachable_api_server_raises_cluster_lost() -> None:
    from kubernetes.aio.client import Configuration

    async with ApiClient(Configuration(host="http://127.0.0.1:1")) as api:
        with pytest.raises(ClusterLost, match="GET /version"):
            await KubeClient(LoaderConnection(api)).version()


async def test_cluster_info_without_grove_is_read(cluster: KubeClient) -> None:
    cluster_info = await read_cluster_info(cluster)
    assert cluster_info.grove is Grove.ABSENT
    assert cluster_info.has_mutating_policies
    assert cluster_info.copies_binding_labels


async def test_a_watch_follows_created_changed_and_deleted_objects(
    cluster: KubeClient, namespace: str
) -> None:
    keys = [Key(namespace, f"settings-{i}") for i in range(3)]
    await cluster.apply(CONFIG_MAPS, settings(keys[0], "a"))
    seen: list[Manifest] = []
    async with watching(cluster, namespace, seen.append, watch_s=1) as watched:
        await watched.synced.wait()
        assert watched.of_group("a") == [watched.get(keys[0])]
        await cluster.apply(CONFIG_MAPS, settings(keys[1], "a"))
        await cluster.apply(CONFIG_MAPS, settings(keys[0], "b"))
        await until(lambda: len(watched.of_group("a")) == len(watched.of_group("b")) == 1)
        found = watched.get(keys[1])
        assert found is not None
        await cluster.delete(CONFIG_MAPS, keys[1], uid=uid_of(found))
        await until(lambda: watched.get(keys[1]) is None)
        assert watched.of_group("a") == []
        moved = [keys[0], keys[0]]  # as it was in the group that it left, and as it is
        assert [key_of(manifest) for manifest in seen] == [keys[0], keys[1], *moved, keys[1]]


async def test_a_watch_with_an_expired_version_lists_again(api: ApiClient, namespace: str) -> None:
    cluster = Forgetful(LoaderConnection(api))
    stays, goes = Key(namespace, "stays"), Key(namespace, "goes")
    for key in (stays, goes):
        await cluster.apply(CONFIG_MAPS, settings(key, "a"))
    losses: list[ClusterError | None] = []
    async with watching(cluster, namespace, lambda _: None, losses.append) as watched:
        await watched.synced.wait()

    found = watched.get(goes)
    assert found is not None
    await cluster.delete(CONFIG_MAPS, goes, uid=uid_of(found))
    cluster.forget()
    going_on = asyncio.create_task(watched.run())
    await until(lambda: watched.get(goes) is None)
    assert watched.get(stays) is not None
    assert losses == []
    await ended(going_on)


async def test_the_next_replica_leads_at_once_when_the_leader_ends(
    cluster: KubeClient, namespace: str
) -> None:
    reported: list[str] = []
    first, second = (replica(cluster, namespace, name, reported, KEPT) for name in ("first", "second"))
    leading = asyncio.create_task(first.run(forever))
    await until(lambda: first.is_leading)
    following = asyncio.create_task(second.run(forever))
    spec = await lease(cluster, namespace)
    await eventually(lambda: renewed(cluster, namespace, spec["renewTime"]))
    assert not second.is_leading
    await ended(leading)
    assert (await lease(cluster, namespace))["holderIdentity"] in ("", "second")
    await until(lambda: second.is_leading)
    spec = await lease(cluster, namespace)
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)
    await ended(following)
    assert reported == ["first leads", "second leads"]


async def test_a_leader_whose_lease_is_taken_stops_its_work(cluster: KubeClient, namespace: str) -> None:
    reported: list[str] = []
    first = replica(cluster, namespace, "first", reported, SOON)
    stopped = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            stopped.set()

    leading = asyncio.create_task(first.run(work))
    await until(lambda: first.is_leading)
    taken: Manifest = {"spec": {"holderIdentity": "another", "renewTime": "2030-01-01T00:00:00.000000Z"}}
    await cluster.merge(LEASES, Key(namespace, "operator"), taken)
    async with asyncio.timeout(WITHIN_S):
        await stopped.wait()
    await until(lambda: "first follows: another replica took the lease" in reported)
    await until(lambda: first.is_leading)  # the other one never renews it
    await ended(leading)


class Forgetful(KubeClient):
    """The API server as it is once it no longer knows the version that the next watch goes on from."""

    _forgets = False

    def forget(self) -> None:
        self._forgets = True

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, labels: str = "", accept: str = "", for_s: int = 0
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        if self._forgets:
            self._forgets = False
            raise RequestRefused("too old resource version", status=GONE, reason="Expired")
        async with super().watch(path, version, labels=labels, accept=accept, for_s=for_s) as stream:
            yield stream


class Recorded:
    def __init__(self, reported: list[str]) -> None:
        self._reported = reported

    def answered(self) -> None:
        pass

    def leads(self, identity: str) -> None:
        self._reported.append(f"{identity} leads")

    def follows(self, identity: str, reason: str) -> None:
        self._reported.append(f"{identity} follows: {reason}")

    def not_renewed(self, error: ClusterError) -> None:
        self._reported.append(f"not renewed: {error}")


def replica(cluster: KubeClient, namespace: str, name: str, reported: list[str], times: LeaseTimes) -> Leader:
    return Leader(cluster, Key(namespace, "operator"), name, times=times, listener=Recorded(reported))


async def forever() -> None:
    await asyncio.Event().wait()


async def lease(cluster: KubeClient, namespace: str) -> dict[str, Any]:
    found = await cluster.read(LEASES, Key(namespace, "operator"))
    assert found is not None
    spec = found["spec"]
    assert isinstance(spec, dict)
    return spec


async def renewed(cluster: KubeClient, namespace: str, before: str) -> bool:
    return bool((await lease(cluster, namespace))["renewTime"] != before)


async def until(is_so: Callable[[], bool]) -> None:
    async def looked() -> bool:
        return is_so()

    await eventually(looked)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def settings(key: Key, value: str) -> Manifest:
    metadata: Manifest = {"namespace": key.namespace, "name": key.name, "labels": {**OURS}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"value": value}}


def value_of(manifest: Manifest) -> str:
    data = manifest["data"]
    assert isinstance(data, dict)
    return str(data["value"])


@asynccontextmanager
async def watching(
    cluster: KubeClient,
    namespace: str,
    changed: Callable[[Manifest], None],
    lost: Callable[[ClusterError | None], None] = lambda _: None,
    watch_s: int = 300,
) -> AsyncIterator[Informer[str]]:
    watched = Informer(
        cluster,
        CONFIG_MAPS,
        labels="kvrouter.test/set=ours",
        namespace=namespace,
        group_of=value_of,
        changed=changed,
        lost=lost,
        watch_s=watch_s,
    )
    task = asyncio.create_task(watched.run())
    yield watched
    await ended(task)
