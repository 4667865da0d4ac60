"""What the leader does over time: what it reads again, holds, records and reports."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from aiohttp import web
from msgspec import Raw
from pydantic import JsonValue

from kvrouter.kube.client import KubeClient, ObjectList, RequestRefused
from kvrouter.kube.objects import (
    EVENTS,
    FLEET_LABEL,
    WORKERS,
    Key,
    Manifest,
    ResourceKind,
    WatchEvent,
    fields_of,
    key_of,
    metadata_of,
)
from kvrouter.operator.api.rollout import Upgrade as UpgradeSpec
from kvrouter.operator.api.status import Condition
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, PODS, TOPOLOGIES
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth
from kvrouter.operator.plan.budgets import zone_budgets
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import fleet_name
from kvrouter.operator.plan.plan import plan
from kvrouter.operator.reconcile import upgrades
from kvrouter.operator.reconcile.apply import BUDGETS, WORKLOADS
from kvrouter.operator.reconcile.controller import Controller
from kvrouter.operator.reconcile.frontend_reader import READ_AGAIN_S
from kvrouter.operator.reconcile.info_reader import INFO_EACH_S
from kvrouter.operator.reconcile.upgrades import REPLICA_SETS
from kvrouter.operator.status.resolved import policy_level
from kvrouter.operator.status.stalled import TEMPLATE_LABEL as HASH
from kvrouter.telemetry import Telemetry
from tests.testing.deployment_statuses import REQUIRED
from tests.testing.metrics_page import metrics_page
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment
from tests.testing.static_cluster import StaticCluster


class Looks(OperatorInstrumentation):
    """Hears which deployments are looked at."""

    def __init__(self) -> None:
        super().__init__(ReplicaHealth())
        self.done: asyncio.Queue[Key] = asyncio.Queue()
        self.losses: list[ResourceKind] = []
        self.errors: list[Exception | None] = []
        self.refused_events: list[RequestRefused] = []
        self.conditions: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    def conditions_are(self, key: Key, conditions: Iterable[Condition]) -> None:
        self.conditions.put_nowait({each.type: each.status.value for each in conditions})

    def looked(self, key: Key, duration_s: float, error: Exception | None, retry_s: float) -> None:
        self.errors.append(error)
        self.done.put_nowait(key)

    def lost(self, kind: ResourceKind, error: object) -> None:
        self.losses.append(kind)

    def event_refused(self, error: RequestRefused) -> None:
        self.refused_events.append(error)


class Zoned(StaticCluster):
    """A deployment whose last decode worker in one zone is gone, and the budget that it left."""

    def __init__(self, fewer_since: datetime) -> None:
        document = deployment(policy=REQUIRED, types=("frontend", "prefill", "decode"))
        policy, resolution = (found := plan(document, FACTS, DEFAULTS)).policy, found.resolution
        assert policy is not None
        assert resolution is not None
        label, decode = policy_level(policy, resolution).pod_label, document.spec.components[2]
        had: list[Manifest] = zone_budgets(document, decode, label, {"a": 2}, [], fewer_since, 60)
        (budget,) = zone_budgets(document, decode, label, {"a": 1}, had, fewer_since, 60)
        self.name = key_of(budget)
        metadata_of(budget)["ownerReferences"] = [{"uid": document.metadata.uid, "controller": True}]
        graph = cast(Manifest, document.model_dump(mode="json", by_alias=True, exclude_none=True))
        super().__init__({DEPLOYMENTS_OF_GRAPHS: [graph], BUDGETS: [budget]})
        self.deleted: asyncio.Queue[Key] = asyncio.Queue()

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        return manifest

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return manifest

    async def delete(self, kind: ResourceKind, key: Key, *, uid: str) -> None:
        self.deleted.put_nowait(key)


class Overloaded(StaticCluster):
    """A deployment by a topology, which is refused from the second time on."""

    def __init__(self, status: int) -> None:
        document = deployment(policy=REQUIRED, types=("frontend", "prefill", "decode"))
        graph = cast(Manifest, document.model_dump(mode="json", by_alias=True, exclude_none=True))
        super().__init__({DEPLOYMENTS_OF_GRAPHS: [graph]})
        self.status = status
        self.asked = 0
        self.refused: asyncio.Queue[None] = asyncio.Queue()

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        if kind == TOPOLOGIES[0]:
            self.asked += 1
            if self.asked > 1:
                self.refused.put_nowait(None)
                raise RequestRefused("no", status=self.status)
        return await super().find(kind, namespace=namespace, labels=labels)

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        return manifest

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return manifest


@asynccontextmanager
async def leads(
    cluster: KubeClient,
    looks: Looks,
    *,
    defaults: PlanDefaults = DEFAULTS,
    info_each_s: float = INFO_EACH_S,
    links_s: float = READ_AGAIN_S,
) -> AsyncIterator[None]:
    """A driver that leads until the block ends."""
    driver = Controller(
        cluster,
        defaults=defaults,
        identity="one",
        lease=Key("kvrouter-system", "kvrouter-operator"),
        namespace="",
        instrumentation=looks,
        info_each_s=info_each_s,
        links_s=links_s,
    )
    task = asyncio.create_task(driver.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("status", "looks_again"), [(429, 0), (500, 0), (503, 0), (403, 1)])
async def test_last_read_topologies_hold_while_the_api_server_is_overloaded(
    status: int, looks_again: int
) -> None:
    cluster, looks = Overloaded(status), Looks()
    async with leads(cluster, looks, info_each_s=0.05):
        async with asyncio.timeout(30.0):
            assert await looks.done.get() == Key("fleet", "llm")
            for _ in range(5):
                await cluster.refused.get()
        assert looks.done.qsize() == looks_again
        assert looks.losses == ([] if looks_again else [TOPOLOGIES[0]])


class WithoutEvents(Overloaded):
    """A namespace in which no event may be written."""

    def __init__(self, status: int) -> None:
        super().__init__(status=503)
        self.of_event = status

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        if kind == EVENTS:
            raise RequestRefused("no", status=self.of_event)
        return manifest


@pytest.mark.parametrize(("status", "fails"), [(403, False), (422, False), (429, True), (503, True)])
async def test_refused_event_does_not_fail_reconciliation_but_an_overload_does(
    status: int, *, fails: bool
) -> None:
    cluster, looks = WithoutEvents(status), Looks()
    async with leads(cluster, looks):
        async with asyncio.timeout(30.0):
            await looks.done.get()
        assert [error is not None for error in looks.errors] == [fails]
        assert bool(looks.refused_events) is not fails


async def test_held_budget_is_removed_when_its_hold_ends_without_any_event() -> None:
    cluster = Zoned(datetime.now(UTC) - timedelta(seconds=58))
    async with leads(cluster, Looks(), defaults=replace(DEFAULTS, disruption_hold_s=60)):
        async with asyncio.timeout(30.0):
            assert await cluster.deleted.get() == cluster.name


class Linked(StaticCluster):
    """A deployment with one frontend, which has its metrics at this port, and its statuses as written."""

    def __init__(self, port: int) -> None:
        variables: list[JsonValue] = [{"name": "DYN_HTTP_PORT", "value": str(port)}]
        template: JsonValue = {"spec": {"containers": [{"name": "main", "env": variables}]}}
        document = deployment(types=("frontend", "decode"), pods={"frontend": template})
        self.graph = cast(Manifest, document.model_dump(mode="json", by_alias=True, exclude_none=True))
        pod: Manifest = {
            "metadata": {
                "namespace": "fleet",
                "name": "llm-frontend-0",
                "resourceVersion": "1",
                "labels": {"kvrouter.dev/deployment": "llm", "kvrouter.dev/component": "frontend"},
            },
            "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        super().__init__({DEPLOYMENTS_OF_GRAPHS: [self.graph], PODS: [pod]})
        self.links: asyncio.Queue[JsonValue] = asyncio.Queue()

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if subresource == "status":
            status = cast(dict[str, JsonValue], manifest["status"])
            self.graph["status"] = status
            if "conditions" in status:
                self.links.put_nowait(status.get("links"))
        return manifest

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return manifest


class Links:
    """What a frontend says of one link: bytes a second, whether it is slow; None for nothing at all."""

    def __init__(self) -> None:
        self.said: tuple[float, bool] | None = (1.2e10, False)
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def answer(self, _request: web.Request) -> web.Response:
        self.asked.put_nowait(None)
        if self.said is None:
            raise web.HTTPServiceUnavailable
        telemetry = Telemetry()
        telemetry.link_bandwidth.replace({("llama", "within one zone"): self.said[0]})
        telemetry.link_latency.replace({("llama", "within one zone"): 0.002})
        telemetry.link_slow.replace({("llama", "within one zone"): float(self.said[1])})
        return web.Response(body=telemetry.render())

    async def are_read(self) -> None:
        """Return once a read that began from now on is over."""
        while not self.asked.empty():
            self.asked.get_nowait()
        for _ in range(2):
            await self.asked.get()


async def test_links_learned_by_a_frontend_are_in_the_status_and_follow_changes() -> None:
    link = {
        "model": "llama",
        "link": "within one zone",
        "bandwidthBytesPerSecond": 12_000_000_000,
        "latencySeconds": 0.002,
        "slow": False,
    }
    links = Links()
    async with metrics_page(links.answer) as port:
        cluster = Linked(port)
        async with asyncio.timeout(30.0), leads(cluster, Looks(), links_s=0.02):
            assert await cluster.links.get() is None
            assert await cluster.links.get() == [link]
            links.said = (1.3e10, False)
            await links.are_read()
            links.said = None
            await links.are_read()
            assert cluster.links.empty()
            links.said = (2e9, True)
            assert await cluster.links.get() == [
                link | {"bandwidthBytesPerSecond": 2_000_000_000, "slow": True}
            ]


class HalfUpgraded(StaticCluster):
    """A deployment with an old and a new decode worker, and a frontend with its metrics at this port."""

    def __init__(self, port: int) -> None:
        variables: list[JsonValue] = [{"name": "DYN_HTTP_PORT", "value": str(port)}]
        template: JsonValue = {"spec": {"containers": [{"name": "main", "env": variables}]}}
        document = deployment(policy=REQUIRED, types=("frontend", "decode"), pods={"frontend": template})
        staged = document.spec.model_copy(update={"upgrade": UpgradeSpec(by="zone")})
        document = document.model_copy(update={"spec": staged})
        manifests = plan(document, FACTS, DEFAULTS).manifests
        (decode,) = (
            each for each in manifests if key_of(each).name == "llm-decode" and each["kind"] == "Deployment"
        )
        spec: JsonValue = {**fields_of(decode["spec"]), "replicas": 2, "paused": True}
        workload: Manifest = {**decode, "metadata": {**metadata_of(decode), "uid": "uid-2"}, "spec": spec}
        owners: JsonValue = [{"uid": "uid-2", "controller": True}]
        annotations = metadata_of(decode)["annotations"]
        replica_set: Manifest = {
            "metadata": {"ownerReferences": owners, "annotations": annotations, "labels": {HASH: "new"}}
        }
        graph = cast(Manifest, document.model_dump(mode="json", by_alias=True, exclude_none=True))
        super().__init__(
            {
                DEPLOYMENTS_OF_GRAPHS: [graph],
                WORKLOADS: [workload],
                REPLICA_SETS: [replica_set],
                PODS: [
                    _pod("frontend", "llm-frontend-0"),
                    _pod("decode", "llm-decode-0", {HASH: "old"}),
                    _pod("decode", "llm-decode-1", {HASH: "new"}),
                ],
                WORKERS: [_card("llm-decode-1", worker_id=7)],
            }
        )
        self.upgrading: asyncio.Queue[tuple[JsonValue, JsonValue]] = asyncio.Queue()
        self.costs: asyncio.Queue[Key] = asyncio.Queue()

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if subresource == "status":
            status = cast(dict[str, list[dict[str, JsonValue]]], manifest["status"])
            for each in status.get("conditions", ()):
                if each["type"] == "Upgrading":
                    self.upgrading.put_nowait((each["status"], each["reason"]))
        return manifest

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        self.costs.put_nowait(key)
        return patch

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return manifest


def _pod(component: str, name: str, labels: dict[str, str] | None = None) -> Manifest:
    """A pod that has been Ready for long."""
    of = {"deployment": "llm", "component": component, "component-type": component}
    named: JsonValue = {**{f"kvrouter.dev/{key}": value for key, value in of.items()}, **(labels or {})}
    ready: JsonValue = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-28T12:00:00Z"}
    return {
        "metadata": {"namespace": "fleet", "name": name, "resourceVersion": "1", "labels": named},
        "status": {"podIP": "127.0.0.1", "conditions": [ready]},
    }


def _card(pod: str, worker_id: int) -> Manifest:
    """The registration of the worker in a pod."""
    owners: JsonValue = [{"kind": "Pod", "name": pod}]
    labels: JsonValue = {FLEET_LABEL: fleet_name("fleet", "llm")}
    card: JsonValue = {"model": "llama", "role": "decode", "worker_id": worker_id}
    return {
        "metadata": {
            "namespace": "fleet",
            "name": f"fleet.llm-{worker_id}",
            "labels": labels,
            "ownerReferences": owners,
        },
        "spec": {"card": card, "lease_s": 3000.0},
    }


async def test_an_upgrade_waits_while_the_frontend_passes_a_new_worker_over() -> None:
    circuit = {"7": 0.0}

    async def answer(_request: web.Request) -> web.Response:
        telemetry = Telemetry()
        telemetry.worker_circuit.replace({("7", "open"): circuit["7"]})
        return web.Response(body=telemetry.render())

    async with metrics_page(answer) as port:
        cluster = HalfUpgraded(port)
        async with asyncio.timeout(30.0), leads(cluster, Looks(), links_s=0.02):
            assert await cluster.upgrading.get() == ("Unknown", "CircuitsUnknown")
            assert cluster.costs.empty()
            assert await cluster.upgrading.get() == ("True", "ReplacingWorkers")
            assert await cluster.costs.get() == Key("fleet", "llm-decode-0")
            circuit["7"] = 1.0
            assert await cluster.upgrading.get() == ("False", "NewWorkersPassedOver")
            circuit["7"] = 0.0
            assert await cluster.upgrading.get() == ("True", "ReplacingWorkers")


class MidBatch(HalfUpgraded):
    """The Deployment of decode workers is amid a batch; ``spec`` replaces fields of the deployment's spec."""

    def __init__(self, spec: Mapping[str, JsonValue], *, paused_by: Sequence[str] = ()) -> None:
        super().__init__(port=9)
        (graph,), (decode,) = self.objects[DEPLOYMENTS_OF_GRAPHS], self.objects[WORKLOADS]
        graph["spec"] = {**fields_of(graph["spec"]), **spec}
        fields_of(decode["spec"])["paused"] = bool(paused_by)
        decode["status"] = {"replicas": 2, "updatedReplicas": 1}
        held: JsonValue = {"f:spec": {"f:paused": {}}}
        metadata_of(decode)["managedFields"] = [
            {"manager": each, "operation": "Update", "fieldsV1": held} for each in paused_by
        ]
        self.patches: asyncio.Queue[tuple[ResourceKind, Manifest]] = asyncio.Queue()
        self.stated: asyncio.Queue[JsonValue] = asyncio.Queue()

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        self.patches.put_nowait((kind, patch))
        return patch

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if kind == WORKLOADS and key_of(manifest).name == "llm-decode":
            self.stated.put_nowait(fields_of(manifest["spec"]).get("paused"))
        return await super().apply(kind, manifest, subresource=subresource)


REFUSED_SPECS = pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"components": "none"}, id="unreadable"),
        pytest.param({"experimental": {}}, id="unplannable"),
    ],
)


@REFUSED_SPECS
async def test_a_refused_spec_pauses_the_batch_that_goes_on(spec: Mapping[str, JsonValue]) -> None:
    cluster = MidBatch(spec)
    async with asyncio.timeout(30.0), leads(cluster, Looks()):
        assert await cluster.upgrading.get() == ("False", "SpecInvalid")
        assert await cluster.patches.get() == (
            WORKLOADS,
            {"metadata": {"uid": "uid-2"}, "spec": {"paused": True}},
        )
    assert cluster.stated.empty()


async def test_a_batch_that_no_controller_has_observed_is_paused_too() -> None:
    cluster = MidBatch({"components": "none"})
    (decode,) = cluster.objects[WORKLOADS]
    metadata_of(decode)["generation"] = 2
    decode["status"] = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}
    async with asyncio.timeout(30.0), leads(cluster, Looks()):
        assert await cluster.upgrading.get() == ("False", "SpecInvalid")
        assert (await cluster.patches.get())[1]["spec"] == {"paused": True}


class PauseRefused(MidBatch):
    """The API server refuses the first pause."""

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        is_first = self.patches.empty()
        await super().merge(kind, key, patch)
        if is_first:
            raise RequestRefused("403", status=403, detail="a webhook denies it")
        return patch


@REFUSED_SPECS
async def test_a_pause_that_the_api_server_refuses_is_tried_again(
    spec: Mapping[str, JsonValue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrades, "LOOK_AGAIN_S", 0.0)
    cluster, looks = PauseRefused(spec), Looks()
    async with asyncio.timeout(30.0), leads(cluster, looks):
        while cluster.patches.qsize() < 2:
            await looks.done.get()
    assert set(looks.errors) == {None}


@pytest.mark.parametrize(
    ("holders", "stated"),
    [(["kvrouter-operator"], False), (["kvrouter-operator", "kubectl"], None), (["kubectl"], None)],
)
async def test_only_a_pause_of_the_operator_ends_when_the_spec_is_mended(
    holders: Sequence[str], stated: JsonValue
) -> None:
    cluster = MidBatch({"upgrade": None}, paused_by=holders)
    async with asyncio.timeout(30.0), leads(cluster, Looks()):
        assert await cluster.stated.get() is stated


class UpgradeRefused(HalfUpgraded):
    """The API server refuses one kind of requests that an upgrade needs; both workers are old."""

    def __init__(self, refused: ResourceKind) -> None:
        super().__init__(port=9)
        for pod in self.objects[PODS]:
            fields_of(metadata_of(pod)["labels"])[HASH] = "old"
        self.refused = refused
        self.readiness: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.is_paused: list[JsonValue] = []

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        if kind == REPLICA_SETS == self.refused:
            raise RequestRefused("403", status=403, detail="you may not list these")
        return await super().find(kind, namespace=namespace, labels=labels)

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        if kind == self.refused:
            raise RequestRefused("403", status=403, detail="a webhook denies it")
        return await super().merge(kind, key, patch)

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if kind == WORKLOADS and key_of(manifest).name == "llm-decode":
            self.is_paused.append(fields_of(manifest["spec"]).get("paused"))
        if subresource == "status":
            status = cast(dict[str, list[dict[str, JsonValue]]], manifest["status"])
            for each in status.get("conditions", ()):
                if each["type"] == "Ready":
                    self.readiness.put_nowait((str(each["reason"]), str(each["message"])))
        return await super().apply(kind, manifest, subresource=subresource)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(PODS, "llm-decode-0: a webhook denies it"), (REPLICA_SETS, "ReplicaSets: you may not list these")],
)
async def test_a_refused_request_pauses_an_upgrade_and_is_in_the_status(
    kind: ResourceKind, words: str
) -> None:
    cluster = UpgradeRefused(kind)
    async with asyncio.timeout(30.0), leads(cluster, Looks()):
        reason, message = await cluster.readiness.get()
    assert reason == "WriteRefused"
    assert words in message
    assert set(cluster.is_paused) == {True}


class Deleted(Linked):
    """A deployment that is deleted once ``is_deleted``."""

    def __init__(self) -> None:
        super().__init__(port=8000)
        self.is_deleted = asyncio.Event()

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, labels: str = "", accept: str = "", for_s: int = 0
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        yield self._deletion() if path == DEPLOYMENTS_OF_GRAPHS.path() else self._nothing()

    async def _deletion(self) -> AsyncIterator[list[WatchEvent]]:
        await self.is_deleted.wait()
        yield [WatchEvent("DELETED", Raw(json.dumps(self.graph).encode()))]
        await asyncio.Event().wait()


async def test_conditions_are_reported_and_removed_with_their_deployment() -> None:
    cluster, looks = Deleted(), Looks()
    async with asyncio.timeout(30.0), leads(cluster, looks):
        expected = {"Ready": "False", "Available": "False", "Reconciling": "True"}
        assert await looks.conditions.get() == expected
        cluster.is_deleted.set()
        while await looks.conditions.get():
            pass
