"""Pods in their nodes' network: the scheduler keeps those apart that take one port of a node."""

import asyncio
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK
from tests.system.cluster.operators import graph, install_crds, operator, wait_for
from tests.testing.processes import eventually


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


def on_host(namespace: str, name: str, *racks: str) -> dict[str, Any]:
    """Three workers of each kind in the network of the nodes of these racks, one each. Decode workers have a
    port of their own.
    """
    fleet = graph(namespace, name)
    for component in fleet["spec"]["components"][1:]:
        spec = component["podTemplate"]["spec"]
        del spec["topologySpreadConstraints"]
        term = {"matchExpressions": [{"key": RACK, "operator": "In", "values": [*racks]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec.update(hostNetwork=True, affinity={"nodeAffinity": required})
        if component["name"] == "decode":
            spec["containers"][0]["env"] = [{"name": "KVROUTER_HEALTH_PORT", "value": "9200"}]
    return fleet


async def test_workers_in_the_host_network_never_share_a_node_port(
    plane: ControlPlane, namespace: str
) -> None:
    nodes = {
        each["metadata"]["labels"][RACK]: each["metadata"]["name"] for each in plane.read("nodes")["items"]
    }
    first, second, third = list(nodes)[:3]
    async with operator(plane, namespace, "one"):
        plane.apply(on_host(namespace, "few", first, second))

        async def is_one_of_each_pending() -> bool:
            counts = {kind: len(found) for kind, found in where(plane, namespace, "few").items()}
            why = pending(plane, namespace)
            are_apart = len(why) == 2 and all("free ports" in message for message in why)
            return are_apart and counts == {"prefill": 2, "decode": 2}

        await eventually(is_one_of_each_pending)
        found = where(plane, namespace, "few")
        assert (
            set(found["prefill"]) == set(found["decode"]) == {nodes[first], nodes[second]}
        )  # each has a port of its own
        plane.apply(on_host(namespace, "few", first, second, third))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True", "few")
        assert set(where(plane, namespace, "few")["decode"]) == {nodes[first], nodes[second], nodes[third]}


def where(plane: ControlPlane, namespace: str, name: str) -> dict[str, list[str]]:
    """The nodes of a deployment's workers, by component."""
    found: dict[str, list[str]] = {}
    pods = plane.read("pods", "--namespace", namespace, "--selector", f"kvrouter.dev/deployment={name}")[
        "items"
    ]
    for pod in pods:
        component, node = pod["metadata"]["labels"]["kvrouter.dev/component"], pod["spec"].get("nodeName")
        if component != "frontend" and node and not pod["metadata"].get("deletionTimestamp"):
            found.setdefault(component, []).append(node)
    return found


def pending(plane: ControlPlane, namespace: str) -> list[str]:
    """Why pods have no node."""
    return [
        condition.get("message", "")
        for pod in plane.read("pods", "--namespace", namespace)["items"]
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
