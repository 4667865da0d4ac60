"""``packDomain`` on a real scheduler: pods in one zone, though it would spread them."""

import asyncio
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK, ZONE, ZONES
from tests.system.cluster.operators import WAIT, graph, install_crds, operator, wait_for
from tests.system.cluster.pods import pod
from tests.testing.processes import eventually

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
REPLICAS = 6


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


def fleet(
    namespace: str, pack_domain: str | None = None, own: dict[str, str] | None = None
) -> dict[str, Any]:
    """Six prefill and six decode workers, and a frontend, which nothing of their own spreads."""
    found = graph(namespace, "llm")
    for component in found["spec"]["components"]:
        if component["type"] != "frontend":
            component["replicas"] = REPLICAS
            del component["podTemplate"]["spec"]["topologySpreadConstraints"]
        if own is not None and component["name"] in own:
            component["topologyConstraint"] = {"packDomain": own[component["name"]]}
    constraint = {"clusterTopologyName": "fabric"}
    if pack_domain is not None:
        constraint["packDomain"] = pack_domain
    found["spec"]["topologyConstraint"] = constraint
    return found


def places(plane: ControlPlane, namespace: str, component: str, label: str = ZONE) -> set[str]:
    """Which values of a node label a component's pods are in; all of them must be bound."""
    query = f"kvrouter.dev/component={component}"
    found = plane.read("pods", "--namespace", namespace, "--selector", query)["items"]
    nodes = {each["metadata"]["name"]: each for each in plane.read("nodes")["items"]}
    return {
        nodes[each["spec"]["nodeName"]]["metadata"]["labels"][label]
        for each in found
        if not each["metadata"].get("deletionTimestamp")
    }


def rolled(plane: ControlPlane, namespace: str) -> None:
    """Return once every pod is of the latest template, and no other is left."""
    for name in ("frontend", "prefill", "decode"):
        plane.kubectl("rollout", "status", f"deployment/llm-{name}", "--namespace", namespace, WAIT)


async def test_a_packed_component_runs_in_one_zone_and_an_unpacked_one_spreads(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, own={"decode": "zone"}))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        assert len(places(plane, namespace, "decode")) == 1
        assert places(plane, namespace, "prefill") == {*ZONES}


async def test_packing_a_running_deployment_moves_it_into_one_zone(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        assert places(plane, namespace, "prefill") == places(plane, namespace, "decode") == {*ZONES}

        plane.apply(fleet(namespace, "zone"))
        plane.kubectl(
            *("wait", "--for=jsonpath={.status.observedGeneration}=2", "dgd/llm"),
            *("--namespace", namespace, WAIT),
        )
        await asyncio.to_thread(rolled, plane, namespace)
        zones = [places(plane, namespace, name) for name in ("frontend", "prefill", "decode")]
        assert zones[0] == zones[1] == zones[2]
        assert len(zones[0]) == 1


async def test_a_components_own_level_packs_it_inside_the_deployments_zone(
    plane: ControlPlane, namespace: str
) -> None:
    policy = {"labelKey": RACK, "domain": "rack"}
    async with operator(plane, namespace, "one"):
        manifest = fleet(namespace, "zone", {"prefill": "rack"})
        manifest["spec"]["experimental"] = {"kvTransferPolicy": policy}
        plane.apply(manifest)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        assert len(places(plane, namespace, "prefill", RACK)) == 1
        assert len(places(plane, namespace, "decode")) == 1


async def test_required_pod_affinity_wins_over_packing(plane: ControlPlane, namespace: str) -> None:
    cache = pod(namespace, "cache", {"app": "cache"})
    cache["spec"]["nodeSelector"] = {ZONE: ZONES[1]}
    near_cache = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": ZONE}
    manifest = fleet(namespace, "zone")
    manifest["spec"]["components"][2]["podTemplate"]["spec"]["affinity"] = {
        "podAffinity": {REQUIRED: [near_cache]}
    }
    async with operator(plane, namespace, "one"):
        plane.apply(cache, manifest)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        assert places(plane, namespace, "decode") == {ZONES[1]}
        assert len(places(plane, namespace, "prefill")) == 1

        async def is_reported() -> bool:  # events are written after the status
            return "is preferred, not required" in str(plane.read("events", "--namespace", namespace))

        await eventually(is_reported)
