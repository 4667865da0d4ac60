"""Grove's topologies come, change and go under a deployment: what rolls, and what does not."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.grove import BINDING, install_grove, topology
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, REGION, ZONE, ZONES
from tests.system.cluster.operators import WAIT, changed, graph, install_crds, operator
from tests.testing.processes import eventually

OLDER = "ClusterTopology"
CRDS = ("crd/clustertopologybindings.grove.io", "crd/clustertopologies.grove.io")
WORKERS = {"prefill", "decode"}
LABEL = "grove.io/topology.rack"
LINK = {"latencySeconds": 0.004, "bandwidthBytesPerSecond": 1.25e9}
TABLE = '{"across":{"bandwidth_bytes_per_s":1250000000.0,"latency_s":0.004,"price_per_gb":0.02}}'


@pytest.fixture
def grove(plane: ControlPlane) -> Iterator[None]:
    """Both kinds of topologies, which are gone again at the end."""
    install_crds(plane)
    for kind in (BINDING, OLDER):
        install_grove(plane, kind)
    yield
    plane.kubectl("delete", *CRDS, "--wait=true")


def of_graph(namespace: str, name: str) -> dict[str, Any]:
    return graph(namespace, "llm", clusterTopologyName=name, domain="zone")


def of_frontend(namespace: str, name: str) -> dict[str, Any]:
    spec = graph(namespace, "llm")
    spec["spec"]["topologyConstraint"] = {"clusterTopologyName": name}
    spec["spec"]["components"][0]["kvCacheTransferTopology"] = {"level": "zone", "mismatchPolicy": "fail"}
    return spec


@pytest.mark.usefixtures("grove")
async def test_a_topology_appearing_changing_and_going_is_followed(plane: ControlPlane) -> None:
    """Of both kinds at once: each step waits until an operator reads topologies again."""
    with new_namespace(plane) as one, new_namespace(plane) as other:
        await asyncio.gather(
            comes_and_goes(plane, one, BINDING, of_graph), comes_and_goes(plane, other, OLDER, of_frontend)
        )


async def comes_and_goes(
    plane: ControlPlane, namespace: str, kind: str, spelling: Callable[[str, str], dict[str, Any]]
) -> None:
    name = f"fabric-{namespace}"
    async with operator(plane, namespace, "one"):
        plane.apply(spelling(namespace, name))
        await reported(plane, namespace, "False", "TopologyNotFound")
        await waited(plane, namespace, "--for=condition=Ready")
        unknown = replica_sets(plane, namespace)

        plane.apply(topology(name, {"zone": ZONE}, kind))
        await reported(plane, namespace, "True", "AllWorkersPlaced")
        await waited(plane, namespace, "--for=condition=DomainBalanced")
        status = plane.read("dgd", "llm", "--namespace", namespace)["status"]
        assert status["domains"] == [{"value": zone, "prefill": 1, "decode": 1} for zone in ZONES]
        found = replica_sets(plane, namespace)
        assert changed(unknown, found) == set(), "the pods were waiting for this very level"

        plane.apply(topology(name, {"region": REGION, "zone": ZONE, "rack": RACK}, kind))
        await levels_are(plane, namespace, f"region={REGION},zone={ZONE},rack={RACK}")
        await settled(plane, namespace)
        assert changed(found, replica_sets(plane, namespace)) == WORKERS
        wider = replica_sets(plane, namespace)

        plane.apply(topology(name, {"region": REGION, "zone": RACK, "rack": ZONE}, kind))
        await levels_are(plane, namespace, f"region={REGION},zone={RACK},rack={ZONE}")

        async def is_renamed() -> bool:
            domains = plane.read("dgd", "llm", "--namespace", namespace)["status"].get("domains", [])
            return bool(domains) and all("-rack-" in each["value"] for each in domains)

        await eventually(is_renamed)
        assert changed(wider, replica_sets(plane, namespace)) == set(), "pods are labelled anew as they are"

        levels, across = {"region": REGION, "zone": RACK, "rack": ZONE}, {**LINK, "pricePerGB": 0.02}
        plane.apply(topology(name, levels, kind, qos={"across": across}))
        await links_are(plane, namespace, TABLE)
        assert changed(wider, replica_sets(plane, namespace)) == {"frontend"}, "links are the router's alone"
        wider = replica_sets(plane, namespace)

        plane.kubectl("delete", kind.lower(), name)
        await reported(plane, namespace, "False", "TopologyNotFound")
        assert changed(wider, replica_sets(plane, namespace)) == set()
        pods = plane.read("pods", "--selector", "kvrouter.dev/component=decode", "--namespace", namespace)
        assert all(each["metadata"]["labels"]["grove.io/topology.zone"] for each in pods["items"])


@pytest.mark.usefixtures("grove")
async def test_pods_stay_packed_when_their_topology_is_deleted(plane: ControlPlane) -> None:
    with new_namespace(plane) as namespace:
        name = f"fabric-{namespace}"
        plane.apply(topology(name, {"zone": ZONE, "rack": RACK}))
        deployment = graph(namespace, "llm")
        deployment["spec"]["topologyConstraint"] = {"clusterTopologyName": name, "packDomain": "rack"}
        for component in deployment["spec"]["components"][1:]:
            del component["podTemplate"]["spec"]["topologySpreadConstraints"]
        async with operator(plane, namespace, "one"):
            plane.apply(deployment)
            await waited(plane, namespace, "--for=condition=Ready")
            packed = replica_sets(plane, namespace)
            pods = plane.read("pods", "--namespace", namespace)["items"]
            assert len(pods) == 7
            assert len({pod["spec"]["nodeName"] for pod in pods}) == 1, "a rack has one node here"

            plane.kubectl("delete", BINDING.lower(), name)

            async def is_reported() -> bool:
                events = plane.read("events", "--namespace", namespace)["items"]
                return any(f"pods stay packed by {RACK}" in event["message"] for event in events)

            plane.kubectl("annotate", "dgd/llm", "example.com/look=again", "--namespace", namespace)
            await eventually(is_reported)
            assert changed(packed, replica_sets(plane, namespace)) == set()


@pytest.mark.usefixtures("grove")
async def test_frontends_with_near_prefill_get_their_place_label(plane: ControlPlane) -> None:
    """At their binding, and again where somebody overwrites it."""
    with new_namespace(plane) as namespace:
        name = f"fabric-{namespace}"
        plane.apply(topology(name, {"zone": ZONE, "rack": RACK}))
        deployment = of_frontend(namespace, name)
        policy = deployment["spec"]["components"][0]["kvCacheTransferTopology"]
        async with operator(plane, namespace, "one"):
            plane.apply(deployment)
            await waited(plane, namespace, "--for=condition=Ready")
            assert LABEL not in frontend_of(plane, namespace)["metadata"]["labels"]
            before = replica_sets(plane, namespace)

            policy["prefill"] = {"level": "rack", "enforcement": "required"}
            plane.apply(deployment)

            async def is_placed() -> bool:
                found = frontend_of(plane, namespace)
                if "nodeName" not in found["spec"]:
                    return False
                node = plane.read("node", found["spec"]["nodeName"])
                rack = node["metadata"]["labels"][RACK]
                return bool(found["metadata"]["labels"].get(LABEL) == rack)

            await rolled(plane, namespace, "frontend")
            await eventually(is_placed)
            assert changed(before, replica_sets(plane, namespace)) == {"frontend"}
            pod = frontend_of(plane, namespace)["metadata"]["name"]
            plane.kubectl("label", "pod", pod, f"{LABEL}=elsewhere", "--overwrite", "--namespace", namespace)
            await eventually(is_placed)


def frontend_of(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """The frontend's newest pod."""
    selector = "kvrouter.dev/component-type=frontend"
    pods = plane.read("pods", "--selector", selector, "--namespace", namespace)["items"]
    return max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


async def links_are(plane: ControlPlane, namespace: str, table: str) -> None:
    async def are() -> bool:
        found = plane.read("replicasets", "--namespace", namespace)["items"]
        containers = [main for each in found for main in each["spec"]["template"]["spec"]["containers"]]
        return {"name": "KVROUTER_ROUTER_LINKS", "value": table} in [
            entry for container in containers for entry in container.get("env", [])
        ]

    await eventually(are)


def replica_sets(plane: ControlPlane, namespace: str) -> dict[str, int]:
    """How many there were for each component: one more each time that it rolls."""
    found = plane.read("replicasets", "--namespace", namespace)["items"]
    return Counter(each["metadata"]["labels"]["kvrouter.dev/component"] for each in found)


async def waited(plane: ControlPlane, namespace: str, what: str) -> None:
    await asyncio.to_thread(plane.kubectl, "wait", what, "dgd/llm", "--namespace", namespace, WAIT)


async def reported(plane: ControlPlane, namespace: str, status: str, reason: str) -> None:
    for field, value in (("reason", reason), ("status", status)):
        path = f'{{.status.conditions[?(@.type=="TopologyResolved")].{field}}}'
        await waited(plane, namespace, f"--for=jsonpath={path}={value}")


async def settled(plane: ControlPlane, namespace: str) -> None:
    for name in WORKERS:
        await rolled(plane, namespace, name)


async def rolled(plane: ControlPlane, namespace: str, name: str) -> None:
    status = ("rollout", "status", f"deployment/llm-{name}", "--namespace", namespace, WAIT)
    await asyncio.to_thread(plane.kubectl, *status)


async def levels_are(plane: ControlPlane, namespace: str, levels: str) -> None:
    async def are() -> bool:
        found = plane.read("deployments", "--namespace", namespace)["items"]
        annotations = [each["metadata"]["annotations"] for each in found]
        return [each.get("kvrouter.dev/topology-levels") for each in annotations].count(levels) == 2

    await eventually(are)
