"""Drains and budgets: evictions as ``kubectl drain`` asks for them, on a real disruption controller."""

import asyncio
import json

import pytest

from kvrouter.operator.plan.budgets import BUDGETS
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.nodes import ZONE, ZONES
from tests.system.cluster.operators import graph, install_crds, operator, wait_for
from tests.testing.processes import eventually


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_budgets_keep_a_zones_last_of_several_decode_workers(
    plane: ControlPlane, namespace: str
) -> None:
    fleet = graph(namespace, "llm", labelKey=ZONE, domain="zone")
    fleet["spec"]["components"][2]["replicas"] = 6  # two in each of three zones
    async with operator(plane, namespace, "one"):
        plane.apply(fleet)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        for zone in ZONES:
            await allowed(plane, namespace, f"llm-decode.{zone}", 1)
        for zone in ZONES:
            await allowed(plane, namespace, f"llm-prefill.{zone}", 1)  # a single one: it may go
        await allowed(plane, namespace, "llm-frontend", 1)

        plane.kubectl("cordon", "--selector", f"{ZONE}={ZONES[0]}")
        try:
            first, second = pods(plane, namespace, ZONES[0])
            evict(plane, namespace, first)
            await allowed(plane, namespace, f"llm-decode.{ZONES[0]}", 0)
            with pytest.raises(KubectlError, match="disruption budget"):
                evict(plane, namespace, second)
        finally:
            plane.kubectl("uncordon", "--selector", f"{ZONE}={ZONES[0]}")


async def test_an_annotation_removes_the_operators_disruption_budgets(
    plane: ControlPlane, namespace: str
) -> None:
    own = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"namespace": namespace, "name": "own"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"kvrouter.dev/component": "decode"}}},
    }
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm", labelKey=ZONE, domain="zone"), own)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        for zone in ZONES:
            await allowed(plane, namespace, f"llm-decode.{zone}", 1)
        await allowed(plane, namespace, "own", 2)
        (first,) = pods(plane, namespace, ZONES[0])
        with pytest.raises(KubectlError, match="more than one PodDisruptionBudget"):
            evict(plane, namespace, first)

        plane.kubectl("annotate", "dgd", "llm", f"{BUDGETS}=none", "--namespace", namespace)

        async def are_gone() -> bool:
            found = plane.read("poddisruptionbudgets", "--namespace", namespace)["items"]
            return [each["metadata"]["name"] for each in found] == ["own"]

        await eventually(are_gone)
        evict(plane, namespace, first)


def evict(plane: ControlPlane, namespace: str, name: str) -> None:
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    plane.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def pods(plane: ControlPlane, namespace: str, zone: str) -> list[str]:
    of = ("--namespace", namespace, "--selector", f"kvrouter.dev/component=decode,{ZONE}={zone}")
    return [each["metadata"]["name"] for each in plane.read("pods", *of)["items"]]


async def allowed(plane: ControlPlane, namespace: str, name: str, number: int) -> None:
    """Return once so many pods of a budget may go."""

    async def is_so() -> bool:
        try:
            found = plane.read("poddisruptionbudget", name, "--namespace", namespace)
        except KubectlError:
            return False
        status = found.get("status", {})
        is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
        return bool(is_seen and status.get("disruptionsAllowed") == number)

    await eventually(is_so)
