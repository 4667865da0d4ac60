"""What a component says of its rollout, its Service and its shared memory is what the cluster has."""

import asyncio
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.operators import graph, install_crds, operator, wait_for
from tests.testing.processes import eventually

INTERNAL = "service.example.com/load-balancer-scheme"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


def fleet(namespace: str, frontend: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    found = graph(namespace, "llm")
    found["spec"]["components"][0].update(frontend)
    found["spec"]["components"][2].update(decode)
    return found


async def test_rollout_service_and_shared_memory_settings_are_applied(
    plane: ControlPlane, namespace: str
) -> None:
    service = {"type": "LoadBalancer", "annotations": {INTERNAL: "internal"}}
    decode = {
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": "50%"}},
        "minReadySeconds": 1,
        "progressDeadlineSeconds": 1800,
        "sharedMemorySize": "1Gi",
    }
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, {"service": service}, decode))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        spec = plane.read("deployment", "llm-decode", "--namespace", namespace)["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": "50%"}
        assert (spec["minReadySeconds"], spec["progressDeadlineSeconds"]) == (1, 1800)
        (volume,) = spec["template"]["spec"]["volumes"]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        found = plane.read("service", "llm-frontend", "--namespace", namespace)
        assert found["spec"]["type"] == "LoadBalancer"
        assert found["metadata"]["annotations"] == {INTERNAL: "internal"}
        plane.apply(fleet(namespace, {}, {"strategy": {"type": "Recreate"}, "sharedMemorySize": 0}))

        async def is_as_before() -> bool:
            spec = plane.read("deployment", "llm-decode", "--namespace", namespace)["spec"]
            found = plane.read("service", "llm-frontend", "--namespace", namespace)
            is_plain = found["spec"]["type"] == "ClusterIP" and INTERNAL not in found["metadata"].get(
                "annotations", {}
            )
            is_whole = spec["strategy"] == {"type": "Recreate"} and "volumes" not in spec["template"]["spec"]
            return is_plain and is_whole and spec["progressDeadlineSeconds"] == 600

        await eventually(is_as_before)
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")


@pytest.mark.parametrize(
    ("frontend", "decode", "words"),
    [
        ({}, {"service": {"type": "NodePort"}}, "service belongs to the component of type frontend"),
        ({"service": {"type": "ExternalName"}}, {}, "service.type: Unsupported value"),
        (
            {"service": {"annotations": {"kvrouter.dev/x": "own"}}},
            {},
            "service.annotations: Invalid value",
        ),
        (
            {},
            {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
            "only for type: RollingUpdate",
        ),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}},
            {},
            "strategy.rollingUpdate: Invalid value: maxSurge and maxUnavailable cannot both be 0",
        ),
        ({}, {"strategy": {"rollingUpdate": {"maxSurge": "1"}}}, "rollingUpdate.maxSurge"),
        ({}, {"minReadySeconds": 600}, "minReadySeconds must be below progressDeadlineSeconds"),
        ({}, {"sharedMemorySize": "8 GiB"}, "sharedMemorySize: Invalid value"),
    ],
)
def test_the_definition_refuses_invalid_rollouts_without_an_operator(
    plane: ControlPlane, namespace: str, frontend: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    with pytest.raises(KubectlError) as error:
        plane.apply(fleet(namespace, frontend, decode))
    assert words in error.value.said.replace('"object": ', ""), error.value.said
