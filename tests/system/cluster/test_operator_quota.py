"""Namespaces whose pods must state limits, and may not ask for too little."""

import asyncio
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE
from tests.system.cluster.operators import graph, install_crds, operator, wait_for
from tests.testing.processes import eventually

STATED = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_pods_start_under_a_quota_and_a_minimum(plane: ControlPlane, namespace: str) -> None:
    hard = {"requests.cpu": "64", "limits.cpu": "64", "limits.memory": "64Gi"}
    least = {"type": "Container", "min": {"cpu": "50m"}}
    plane.apply(
        of(namespace, "ResourceQuota", hard=hard),
        of(namespace, "LimitRange", limits=[least]),
    )
    fleet = graph(namespace, "llm", labelKey=ZONE, domain="zone")
    workers = [each["podTemplate"]["spec"] for each in fleet["spec"]["components"][1:]]
    for spec in workers:
        spec["containers"][0]["resources"] = STATED
    async with operator(plane, namespace, "one"):
        plane.apply(fleet)

        async def is_refused() -> bool:
            found = plane.read("dgd", "llm", "--namespace", namespace).get("status", {}).get("conditions", [])
            return any("minimum cpu usage" in each["message"] for each in found if each["type"] == "Ready")

        await eventually(is_refused)
        for spec in workers:
            spec["initContainers"] = [{"name": "topology-wait", "resources": STATED}]
        plane.apply(fleet)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        used = plane.read("resourcequota", "few", "--namespace", namespace)["status"]["used"]
        assert used["limits.cpu"] != "0"


def of(namespace: str, kind: str, **spec: object) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": "few"}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}
