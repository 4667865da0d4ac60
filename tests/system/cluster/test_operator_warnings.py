"""What the API server warns of, as PodSecurity does of pod templates, reaches who runs the deployment."""

import asyncio

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import events, graph, install_crds, operator, wait_for
from tests.system.cluster.refusals import with_main
from tests.testing.processes import eventually

VIOLATES = 'Deployment llm-decode: would violate PodSecurity "restricted:latest"'
REASON = "ApiServerWarning"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_each_api_server_warning_is_one_event_and_one_log_line(
    plane: ControlPlane, namespace: str
) -> None:
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/warn=restricted")
    async with operator(plane, namespace, "one") as replica:
        plane.apply(with_main(graph(namespace, "llm"), {"image": "example.com/engine:1"}))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")

        async def is_warned() -> bool:  # events are written after the status
            return any(VIOLATES in message for message in warned(plane, namespace))

        await eventually(is_warned)
        assert len(warned(plane, namespace)) == 1
        plane.kubectl("label", "deployment/llm-decode", "--namespace", namespace, "--overwrite", *SPOILT)

        async def is_put_right() -> bool:
            found = plane.read("deployment", "llm-decode", "--namespace", namespace)["metadata"]
            return bool(found["labels"]["app.kubernetes.io/name"] == "kvrouter")

        await eventually(is_put_right)
        assert len(warned(plane, namespace)) == 1
        lines = [line for line in replica.log.splitlines() if "api_server_warns" in line]
        assert len(lines) == 1
        assert "would violate PodSecurity" in lines[0]


SPOILT = ("app.kubernetes.io/name=spoilt",)


def warned(plane: ControlPlane, namespace: str) -> list[str]:
    found = [each for each in events(plane, namespace) if each["reason"] == REASON]
    assert {each["count"] for each in found} <= {1}
    return [each["message"] for each in found]
