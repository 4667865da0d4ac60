"""Which deployments each event queues, as the sources hear it from a watch."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, cast

import pytest
from msgspec import Raw
from pydantic import JsonValue

from kvrouter.kube.objects import FLEET_LABEL, WORKERS, Key, Manifest, ResourceKind, WatchEvent, key_of
from kvrouter.operator.api.deployment import DEFAULT_CLASS
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES, PODS
from kvrouter.operator.plan.manifest import fleet_name
from kvrouter.operator.plan.node_cordons import CORDON_ANNOTATION
from kvrouter.operator.reconcile import sources as sources_module
from kvrouter.operator.reconcile.apply import OWNED, WORKLOADS
from kvrouter.operator.reconcile.frontend_reader import READ_AGAIN_S
from kvrouter.operator.reconcile.info_reader import INFO_EACH_S
from kvrouter.operator.reconcile.sources import GATHER_S, Sources
from tests.testing.calls import WatchCalls
from tests.testing.static_cluster import StaticCluster

Verb = Literal["ADDED", "MODIFIED", "DELETED"]
OWN: Manifest = {"by": "the operator"}
LLM, OTHER = Key("fleet", "llm"), Key("fleet", "other")


def graph(key: Key, version: str = "1", **metadata: JsonValue) -> Manifest:
    """A deployment whose uid is its name."""
    place: Manifest = {"namespace": key.namespace, "name": key.name, "uid": key.name, "generation": 1}
    return {"metadata": {**place, "resourceVersion": version, **metadata}, "spec": {}}


def pod(version: str = "1") -> Manifest:
    """A pod of LLM's on the node n1."""
    metadata: Manifest = {"namespace": "fleet", "name": "llm-decode-0", "resourceVersion": version}
    return {
        "metadata": {**metadata, "labels": {"kvrouter.dev/deployment": "llm"}},
        "spec": {"nodeName": "n1"},
    }


def node(version: str, **metadata: JsonValue) -> Manifest:
    """The node n1."""
    return {"metadata": {"name": "n1", "resourceVersion": version, **metadata}}


def owned(kind: ResourceKind, owner: str) -> Manifest:
    """An object that the deployment of this uid controls."""
    owners: JsonValue = [{"uid": owner, "controller": True}]
    metadata: Manifest = {"namespace": "fleet", "name": "it", "resourceVersion": "2"}
    return {"kind": kind.name, "metadata": {**metadata, "ownerReferences": owners}}


def worker(of: Key) -> Manifest:
    """A worker that registered in a deployment's fleet."""
    labels: Manifest = {FLEET_LABEL: fleet_name(*of)}
    metadata: Manifest = {"namespace": of.namespace, "name": "w", "resourceVersion": "2", "labels": labels}
    return {"metadata": metadata, "spec": {"card": {"model": "m", "role": "decode"}, "lease_s": 10.0}}


class Cluster(StaticCluster):
    """Two deployments, a pod of the first one and its node; changes come by a watch as tests say them."""

    def __init__(self) -> None:
        there: Mapping[ResourceKind, Sequence[Manifest]] = {
            DEPLOYMENTS_OF_GRAPHS: [graph(LLM), graph(OTHER)],
            PODS: [pod()],
            NODES: [node("1")],
        }
        super().__init__(there)
        self.changes: dict[str, asyncio.Queue[WatchEvent]] = {}

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, labels: str = "", accept: str = "", for_s: int = 0
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        self.changes[path] = asyncio.Queue()
        yield self._changes(self.changes[path])

    async def _changes(self, changes: asyncio.Queue[WatchEvent]) -> AsyncIterator[list[WatchEvent]]:
        while True:
            yield [await changes.get()]

    def says(self, kind: ResourceKind, manifest: Manifest, verb: Verb = "MODIFIED") -> None:
        """Have a watch bring this change."""
        self.changes[kind.path()].put_nowait(WatchEvent(verb, Raw(json.dumps(manifest).encode())))


class Queued:
    """Hears which deployments are queued, and after how many seconds."""

    def __init__(self) -> None:
        self.added: asyncio.Queue[tuple[Key, float]] = asyncio.Queue()

    def enqueue(self, key: Key, in_s: float) -> None:
        self.added.put_nowait((key, in_s))

    async def next(self, n: int) -> list[tuple[Key, float]]:
        """The next so many, after which nothing more is queued."""
        async with asyncio.timeout(30.0):
            found = [await self.added.get() for _ in range(n)]
        assert self.added.empty()
        return found


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[tuple[Sources, Queued]]:
    """Sources that have seen everything, and what they queue from then on."""
    queued = Queued()
    sources = Sources(
        cluster,
        queued.enqueue,
        is_own_status=lambda found: found.get("status") == OWN,
        lost=lambda _kind, _error: None,
        namespace="",
        class_name=DEFAULT_CLASS,
        reads_workers=True,
        info_each_s=INFO_EACH_S,
        links_s=READ_AGAIN_S,
    )

    async def watch() -> None:
        async with asyncio.TaskGroup() as group:
            await sources.start(group)

    task = asyncio.create_task(watch())
    try:
        assert set(await queued.next(9)) == {(LLM, 0.0), (OTHER, 0.0), (LLM, GATHER_S)}
        yield sources, queued
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("kind", "change", "queues"),
    [
        (DEPLOYMENTS_OF_GRAPHS, graph(LLM, "2", generation=2), [(LLM, 0.0)]),
        (DEPLOYMENTS_OF_GRAPHS, graph(LLM, "2", labels={"a": "b"}), [(LLM, 0.0)]),
        (DEPLOYMENTS_OF_GRAPHS, {**graph(LLM, "2"), "status": {"by": "somebody else"}}, [(LLM, 0.0)]),
        *((kind, owned(kind, "other"), [(OTHER, GATHER_S)]) for kind in OWNED),
        (PODS, pod("2"), [(LLM, GATHER_S)]),
        (WORKERS, worker(OTHER), [(OTHER, GATHER_S)]),
        (NODES, node("2", labels={"rack": "r1"}), [(LLM, GATHER_S)]),
        (NODES, node("2", annotations={CORDON_ANNOTATION: "true"}), [(LLM, 0.0), (OTHER, 0.0)]),
    ],
)
async def test_a_change_queues_the_deployments_that_it_concerns(
    kind: ResourceKind, change: Manifest, queues: list[tuple[Key, float]]
) -> None:
    cluster = Cluster()
    async with watching(cluster) as (_, queued):
        cluster.says(kind, change)
        assert await queued.next(len(queues)) == queues


@pytest.mark.parametrize(
    ("kind", "change", "then", "queues"),
    [
        (DEPLOYMENTS_OF_GRAPHS, {**graph(LLM, "2"), "status": OWN}, graph(OTHER, "2"), [(OTHER, 0.0)]),
        (NODES, node("2", annotations={"a": "b"}), node("3", labels={"rack": "r1"}), [(LLM, GATHER_S)]),
        (WORKLOADS, owned(WORKLOADS, "somebody"), owned(WORKLOADS, "llm"), [(LLM, GATHER_S)]),
    ],
)
async def test_a_change_that_concerns_no_deployment_queues_none(
    kind: ResourceKind, change: Manifest, then: Manifest, queues: list[tuple[Key, float]]
) -> None:
    cluster = Cluster()
    async with watching(cluster) as (_, queued):
        cluster.says(kind, change)
        cluster.says(kind, then)
        assert await queued.next(1) == queues


async def test_deleted_deployment_is_queued_and_its_objects_queue_nothing() -> None:
    cluster = Cluster()
    async with watching(cluster) as (sources, queued):
        sources.bindings_are_due = False
        cluster.says(DEPLOYMENTS_OF_GRAPHS, graph(LLM, "2"), "DELETED")
        assert await queued.next(1) == [(LLM, 0.0)]
        assert sources.bindings_are_due, "its policies go"
        cluster.says(WORKLOADS, owned(WORKLOADS, "llm"))
        cluster.says(WORKLOADS, owned(WORKLOADS, "other"))
        assert await queued.next(1) == [(OTHER, GATHER_S)]


async def test_pods_are_searched_for_changed_nodes_and_not_for_listed_ones(
    watch_calls: WatchCalls,
) -> None:
    searched = watch_calls(sources_module, "node_name_of")
    cluster = Cluster()
    async with watching(cluster) as (sources, queued):
        assert not searched
        sources.nodes_changed.clear()
        cluster.says(NODES, node("2", labels={"rack": "r1"}))
        assert await queued.next(1) == [(LLM, GATHER_S)]
        assert [key_of(cast("Manifest", call.arguments[0])).name for call in searched] == ["llm-decode-0"]
        assert sources.nodes_changed.is_set(), "policies for bindings know where every node is"
