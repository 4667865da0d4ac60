"""A component that gets another name serves until the pods of the new name do."""

import asyncio
import json
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT, graph, install_crds, operator, wait_for
from tests.testing.processes import eventually

NOWHERE = {"example.com/there-is-none": "true"}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_renamed_components_old_pods_end_once_new_ones_are_ready(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one", "--network-policies"):
        fleet = await served(plane, namespace)
        write(plane, renamed(fleet, NOWHERE))
        await until_reconciled(plane, namespace)
        assert {"llm-decode", "llm-decode-b"} <= names(plane, "deployments", namespace)
        assert {"llm-decode", "llm-decode-b"} <= names(plane, "networkpolicies", namespace)
        found = plane.read("deployment", "llm-decode", "--namespace", namespace)
        assert found["status"]["readyReplicas"] == 3
        write(plane, renamed(fleet, {}))
        plane.kubectl("wait", "--for=delete", "deployment/llm-decode", "--namespace", namespace, WAIT)
        found = plane.read("deployment", "llm-decode-b", "--namespace", namespace)
        assert found["status"]["readyReplicas"] == 3
        plane.kubectl("wait", "--for=delete", "networkpolicy/llm-decode", "--namespace", namespace, WAIT)


async def test_a_renamed_components_old_pods_end_after_the_hold_limit(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one", "--disruption-hold-s", "3"):
        fleet = await served(plane, namespace)
        write(plane, renamed(fleet, NOWHERE))
        plane.kubectl("wait", "--for=delete", "deployment/llm-decode", "--namespace", namespace, WAIT)
        assert "llm-decode-b" in names(plane, "deployments", namespace)


async def served(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    fleet = graph(namespace, "llm")
    plane.apply(fleet)
    await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
    return fleet


def renamed(fleet: dict[str, Any], selector: dict[str, str]) -> dict[str, Any]:
    """The same with another name of the decode workers, which run where ``selector`` says."""
    copy: dict[str, Any] = json.loads(json.dumps(fleet))
    decode = copy["spec"]["components"][2]
    decode["name"] = "decode-b"
    decode["podTemplate"]["spec"]["nodeSelector"] = selector
    return copy


def write(plane: ControlPlane, fleet: dict[str, Any]) -> None:
    plane.kubectl("replace", "--filename", "-", stdin=json.dumps(fleet))


async def until_reconciled(plane: ControlPlane, namespace: str) -> None:
    async def is_so() -> bool:
        found = plane.read("dgd", "llm", "--namespace", namespace)
        return bool(found["status"].get("observedGeneration") == found["metadata"]["generation"])

    await eventually(is_so)


def names(plane: ControlPlane, kind: str, namespace: str) -> set[str]:
    return {each["metadata"]["name"] for each in plane.read(kind, "--namespace", namespace)["items"]}
