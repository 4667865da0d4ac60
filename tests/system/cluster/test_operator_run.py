"""The operator as a process: what a deployment says becomes so, and its status tells how it is."""

import json
from itertools import count
from typing import Any

import httpx
import pytest
from kubernetes.aio.client import ApiClient

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK, ZONES
from tests.system.cluster.operators import (
    LATE,
    WAIT,
    Operator,
    account_with_roles,
    changed,
    generations,
    graph,
    install_crds,
    operator,
    reasons,
    until_replaced,
    wait_for,
)
from tests.system.cluster.pods import bound, pod, worker_name
from tests.testing.processes import eventually

OWNED = "deployments,services,serviceaccounts,roles,rolebindings"
ZONE_POLICY = {"labelKey": "topology.kubernetes.io/zone", "domain": "zone"}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_deployment_gets_its_objects_labels_and_status(plane: ControlPlane, namespace: str) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm", **ZONE_POLICY))
        wait_for(plane, namespace, "Ready=True")
        wait_for(plane, namespace, "DomainBalanced=True")
        dgd = plane.read("dgd", "llm", "--namespace", namespace)
        owned = plane.read(OWNED, "--namespace", namespace, "--show-managed-fields")["items"]
        owned = [each for each in owned if each["metadata"]["name"] != "default"]
        assert sorted((each["kind"], each["metadata"]["name"]) for each in owned) == [
            ("Deployment", "llm-decode"),
            ("Deployment", "llm-frontend"),
            ("Deployment", "llm-prefill"),
            ("Role", "llm-frontends"),
            ("Role", "llm-workers"),
            ("RoleBinding", "llm-frontends"),
            ("RoleBinding", "llm-workers"),
            ("Service", "llm-frontend"),
            ("ServiceAccount", "llm-frontends"),
            ("ServiceAccount", "llm-workers"),
        ]
        for each in owned:
            (owner,) = each["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (dgd["metadata"]["uid"], True)
            managers = {entry["manager"] for entry in each["metadata"]["managedFields"]}
            assert "kvrouter-operator" in managers
        status = dgd["status"]
        assert status["observedGeneration"] == dgd["metadata"]["generation"]
        assert status["domains"] == [{"value": zone, "prefill": 1, "decode": 1} for zone in ZONES]
        assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
            "Ready": "True",
            "Available": "False",
            "TopologyResolved": "True",
            "DomainBalanced": "True",
        }
        row = plane.kubectl("get", "dgd", "llm", "--namespace", namespace, "--no-headers").split()
        assert row[:4] == ["llm", "True", "False", "zone"], "nobody runs in the pods of these nodes"

        async def is_reported() -> bool:  # events are written after the status
            return "Applied" in reasons(plane, namespace)

        await eventually(is_reported)
        reported = reasons(plane, namespace)
        assert not reported & {"DomainWithoutDecode", "LabelsNotCopied"}, "a start is no trouble"


async def test_only_changed_components_roll_and_removed_ones_are_deleted(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        spec = graph(namespace, "llm", **ZONE_POLICY)
        plane.apply(spec)
        wait_for(plane, namespace, "Ready=True")
        first = generations(plane, namespace)
        spec["spec"]["components"][2]["replicas"] = 6
        plane.apply(spec)
        ready_at(plane, namespace, 2)
        second = generations(plane, namespace)
        assert changed(first, second) == {"llm-decode"}

        policy = spec["spec"]["experimental"]["kvTransferPolicy"]
        policy["enforcement"] = "fallback"
        plane.apply(spec)
        ready_at(plane, namespace, 3)
        third = generations(plane, namespace)
        assert changed(second, third) == {"llm-frontend", "llm-prefill"}
        assert (
            plane.read("dgd", "llm", "--namespace", namespace)["status"]["policy"]["enforcement"]
            == "fallback"
        )

        spec["spec"]["components"] = spec["spec"]["components"][:1]
        plane.kubectl("replace", "--filename", "-", stdin=json.dumps(spec))
        for name in ("llm-prefill", "llm-decode"):
            plane.kubectl("wait", "--for=delete", f"deployment/{name}", "--namespace", namespace, WAIT)
        assert set(generations(plane, namespace)) == {"llm-frontend"}


async def test_changed_or_deleted_objects_are_restored_and_end_with_the_deployment(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm"))
        wait_for(plane, namespace, "Ready=True")
        before = plane.read("deployment", "llm-decode", "--namespace", namespace)["metadata"]["uid"]
        plane.kubectl("scale", "deployment/llm-prefill", "--replicas=0", "--namespace", namespace)
        plane.kubectl("delete", "deployment/llm-decode", "--namespace", namespace)

        async def is_put_right() -> bool:
            found = {
                each["metadata"]["name"]: each
                for each in plane.read("deployments", "--namespace", namespace)["items"]
            }
            decode = found.get("llm-decode")
            return (
                decode is not None
                and decode["metadata"]["uid"] != before
                and found["llm-prefill"]["spec"]["replicas"] == 3
            )

        await eventually(is_put_right)
        plane.kubectl("delete", "dgd", "llm", "--namespace", namespace)
        for kind in ("deployments", "services", "pods"):
            plane.kubectl("wait", "--for=delete", kind, "--all", "--namespace", namespace, WAIT)


async def test_orphaned_objects_are_adopted_by_the_next_deployment(
    plane: ControlPlane, namespace: str
) -> None:
    def uids() -> dict[str, str]:
        found = plane.read(f"{OWNED},pods", "--namespace", namespace)["items"]
        return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["uid"] for each in found}

    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm", **ZONE_POLICY))
        wait_for(plane, namespace, "Ready=True")
        before, first = uids(), generations(plane, namespace)
        plane.kubectl("delete", "dgd", "llm", "--cascade=orphan", "--namespace", namespace)
        assert uids() == before
        plane.apply(graph(namespace, "llm", **ZONE_POLICY))
        wait_for(plane, namespace, "Ready=True")

        async def is_reported() -> bool:
            found = plane.read("events", "--namespace", namespace)["items"]
            return any(
                "adopted" in each["message"] and "Deployment llm-decode" in each["message"] for each in found
            )

        await eventually(is_reported)
        assert uids() == before
        assert changed(first, generations(plane, namespace)) == set()
        assert "NameTaken" not in reasons(plane, namespace)
        dgd = plane.read("dgd", "llm", "--namespace", namespace)["metadata"]["uid"]
        for each in plane.read(OWNED, "--namespace", namespace)["items"]:
            owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]
            assert owners == ([] if each["metadata"]["name"] == "default" else [dgd])


async def test_a_recreated_deployment_waits_for_pending_deletions(
    plane: ControlPlane, namespace: str
) -> None:
    spec = graph(namespace, "llm")
    async with operator(plane, namespace, "one"):
        for _ in range(3):
            plane.apply(spec)
            wait_for(plane, namespace, "Ready=True")
            plane.kubectl("delete", "dgd", "llm", "--namespace", namespace)
        plane.apply(spec)
        wait_for(plane, namespace, "Ready=True")
        assert "NameTaken" not in reasons(plane, namespace)


async def test_foreign_objects_of_the_same_name_are_left_and_reported(
    plane: ControlPlane, namespace: str
) -> None:
    ports = {"ports": [{"port": 1}]}
    metadata = {"namespace": namespace, "name": "llm-frontend"}
    plane.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": ports})
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm"))

        async def is_reported() -> bool:
            return "NameTaken" in reasons(plane, namespace)

        await eventually(is_reported)
        found = plane.read("service", "llm-frontend", "--namespace", namespace)
        assert [port["port"] for port in found["spec"]["ports"]] == [1]
        plane.kubectl("delete", "service/llm-frontend", "--namespace", namespace)
        plane.kubectl("wait", "--for=create", "service/llm-frontend", "--namespace", namespace, WAIT)


async def test_a_later_node_label_reaches_the_nodes_pods(plane: ControlPlane, namespace: str) -> None:
    node, key = "late", "example.com/late"
    plane.add_node(node, {"kvrouter.test/late": "yes"})
    try:
        async with operator(plane, namespace, "one"):
            spec = graph(namespace, "llm", labelKey=key, domain="cage")
            for component in spec["spec"]["components"][1:]:
                component["replicas"] = 1
                component["podTemplate"]["spec"] = {
                    "containers": component["podTemplate"]["spec"]["containers"],
                    "nodeSelector": {"kvrouter.test/late": "yes"},
                }
            plane.apply(spec)
            wait_for(plane, namespace, "TopologyResolved=False")
            plane.kubectl("label", "node", node, f"{key}=cage-1")
            wait_for(plane, namespace, "DomainBalanced=True")
            assert domains(plane, namespace) == [{"value": "cage-1", "prefill": 1, "decode": 1}]
            plane.kubectl("label", "node", node, "--overwrite", f"{key}=cage-2")

            async def is_moved() -> bool:
                return domains(plane, namespace) == [{"value": "cage-2", "prefill": 1, "decode": 1}]

            await eventually(is_moved)
    finally:
        plane.kubectl("delete", "node", node)


async def test_node_places_follow_created_changed_and_deleted_nodes(
    plane: ControlPlane, namespace: str
) -> None:
    node, key = f"node-{namespace}", f"example.com/{namespace}"

    async def becomes(wanted: list[str] | None) -> None:
        async def is_so() -> bool:
            there = [each["spec"] for each in plane.read("kvnp")["items"]]
            values = [spec["values"] for spec in there if spec["levels"] == [f"cage={key}"]]
            return len(values) == 1 and values[0].get(node) == wanted

        await eventually(is_so)

    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm", labelKey=key, domain="cage"))
        await becomes(None)
        plane.add_node(node, {})
        try:
            await becomes([""])
            plane.kubectl("label", "node", node, f"{key}=cage-1")
            await becomes(["cage-1"])
        finally:
            plane.kubectl("delete", "node", node)
        await becomes(None)


async def test_the_binding_policy_labels_pods_and_ends_with_its_deployment(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    async with operator(plane, namespace, "one") as replica:
        plane.apply(graph(namespace, "llm", labelKey=RACK, domain="rack"))
        wait_for(plane, namespace, "DomainBalanced=True")
        numbers = count()
        seen: dict[str, Any] = {}

        async def is_in_force() -> bool:
            stray = pod(namespace, worker_name("llm-prefill", next(numbers)), {RACK: "forged"})
            seen.update(await bound(plane, api, stray))
            return bool(seen["metadata"]["labels"][RACK] != "forged")

        await eventually(is_in_force)
        node = plane.read("node", seen["spec"]["nodeName"])
        assert seen["metadata"]["labels"][RACK] == node["metadata"]["labels"][RACK]
        assert namespace in policy_namespaces(plane)
        wait_for(plane, namespace, "TopologyResolved=True")
        before = (await replica.metrics()).total(LATE)
        await until_replaced(plane, namespace, "decode")
        wait_for(plane, namespace, "TopologyResolved=True")
        assert (await replica.metrics()).total(LATE) == before
        plane.kubectl("delete", "dgd", "llm", "--namespace", namespace)

        async def is_gone() -> bool:
            return namespace not in policy_namespaces(plane)

        await eventually(is_gone)


async def test_a_zone_without_decode_workers_is_reported(plane: ControlPlane, namespace: str) -> None:
    async with operator(plane, namespace, "one"):
        spec = graph(namespace, "llm", **ZONE_POLICY)
        decode = spec["spec"]["components"][2]["podTemplate"]["spec"]
        decode["nodeSelector"] = {"topology.kubernetes.io/zone": ZONES[0]}
        plane.apply(spec)
        wait_for(plane, namespace, "DomainBalanced=False")

        async def is_reported() -> bool:
            prefill = {each["value"]: each["prefill"] for each in domains(plane, namespace)}
            is_counted = prefill == dict.fromkeys(ZONES, 1)
            return is_counted and "DomainWithoutDecode" in reasons(plane, namespace)

        await eventually(is_reported)


async def test_a_follower_takes_over_from_a_killed_or_ended_leader(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one") as one:
        await until_leading(one)
        async with operator(plane, namespace, "two") as two:
            plane.apply(graph(namespace, "first"))
            plane.kubectl("wait", "--for=create", "deployment/first-decode", "--namespace", namespace, WAIT)
            await one.end(at_once=True)
            plane.apply(graph(namespace, "second"))
            plane.kubectl("wait", "--for=create", "deployment/second-decode", "--namespace", namespace, WAIT)
            await until_leading(two)
            async with operator(plane, namespace, "three") as three:

                async def is_up() -> bool:
                    return " ready " in three.log

                await eventually(is_up)
                assert await two.end() == 0
                plane.apply(graph(namespace, "third"))
                made = ("wait", "--for=create", "deployment/third-decode", "--namespace", namespace, WAIT)
                plane.kubectl(*made)
                await until_leading(three)


async def test_the_shipped_roles_suffice_and_metrics_show_the_operators_work(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with operator(plane, namespace, "one", kubeconfig=account) as replica:
        plane.apply(graph(namespace, "llm", labelKey=RACK, domain="rack"))
        wait_for(plane, namespace, "Ready=True")
        wait_for(plane, namespace, "DomainBalanced=True")

        async def is_reported() -> bool:
            return {"Applied", "AllPodsReady"} <= reasons(plane, namespace)

        await eventually(is_reported)
        assert namespace in policy_namespaces(plane)
        spec = graph(namespace, "llm")
        spec["spec"]["components"] = spec["spec"]["components"][:1]
        plane.kubectl("replace", "--filename", "-", stdin=json.dumps(spec))
        plane.kubectl("wait", "--for=delete", "deployment/llm-prefill", "--namespace", namespace, WAIT)
        assert "forbidden" not in replica.log
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{replica.port('http')}", timeout=60.0
        ) as client:
            assert (await client.get("/healthz")).text == "ok\n"
            assert (await client.get("/readyz")).status_code == 200

        async def is_counted() -> bool:
            page = await replica.metrics()
            is_well = page.total("operator_leading") == 1 and not page.total("operator_watches_lost")
            return is_well and page.total("operator_objects_total", change="created", kind="Deployment") == 3

        await eventually(is_counted)


async def until_leading(replica: Operator) -> None:
    """Lines come to the log in batches: the work of who leads may be seen sooner."""

    async def is_leading() -> bool:
        return replica.is_leading

    await eventually(is_leading)


def ready_at(plane: ControlPlane, namespace: str, generation: int) -> None:
    observed = f"--for=jsonpath={{.status.observedGeneration}}={generation}"
    plane.kubectl("wait", observed, "dgd/llm", "--namespace", namespace, WAIT)
    wait_for(plane, namespace, "Ready=True")


def domains(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plane.read("dgd", "llm", "--namespace", namespace)["status"]["domains"]
    return found


def policy_namespaces(plane: ControlPlane) -> set[str]:
    """The namespaces whose pods are labelled at their binding."""
    found = plane.read("mutatingadmissionpolicies")["items"]
    selectors = [each["spec"]["matchConstraints"]["namespaceSelector"] for each in found]
    return {value for selector in selectors for value in selector["matchExpressions"][0]["values"]}
