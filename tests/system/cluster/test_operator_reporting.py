"""Nothing that a user wrote is ignored silently: events and a status tell it, each once."""

import json
import re
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT, events, graph, install_crds, operator, wait_for
from tests.testing.processes import eventually

ZONE = "topology.kubernetes.io/zone"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_an_overwritten_setting_is_one_event_per_spec_version(
    plane: ControlPlane, namespace: str
) -> None:
    spec = graph(namespace, "llm", labelKey=ZONE, domain="zone")
    main = spec["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    main["env"] = [{"name": "DYN_KV_TRANSFER_DOMAIN", "value": "rack"}]
    async with operator(plane, namespace, "one"):
        plane.apply(spec)
        wait_for(plane, namespace, "Ready=True")

        async def is_reported() -> bool:
            return len(warnings(plane, namespace)) == 1

        await eventually(is_reported)
        (warning,) = warnings(plane, namespace)
        assert warning["message"] == (
            "spec.components[1].podTemplate.spec.containers[0].env[0] DYN_KV_TRANSFER_DOMAIN follows from "
            "the policy of KV transfers, and becomes 'zone': remove it here"
        )
        plane.kubectl("delete", "pods", "--all", "--namespace", namespace)
        plane.kubectl("rollout", "status", "deployment/llm-prefill", "--namespace", namespace, WAIT)
        wait_for(plane, namespace, "Ready=True")
    spec["spec"]["components"][1]["replicas"] = 4
    plane.apply(spec)
    async with operator(plane, namespace, "two"):

        async def is_reported_again() -> bool:
            return len(warnings(plane, namespace)) == 2

        await eventually(is_reported_again)
        assert [each["count"] for each in warnings(plane, namespace)] == [1, 1]


async def test_an_invalid_spec_is_reported_in_the_status_until_fixed(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm", labelKey=f"{'a.' * 130}a/zone", domain="zone"))
        wait_for(plane, namespace, "Ready=False")
        found = plane.read("dgd", "llm", "--namespace", namespace)
        ready, stalled = found["status"]["conditions"]  # of what cannot be read nothing else is known
        assert (stalled["type"], stalled["message"]) == ("Stalled", ready["message"])
        assert ready["reason"] == "SpecInvalid"
        assert "spec.experimental.kvTransferPolicy.labelKey" in ready["message"]
        assert found["status"]["observedGeneration"] == 1
        assert plane.read("deployments", "--namespace", namespace)["items"] == []
        plane.kubectl(
            "replace",
            "--filename",
            "-",
            stdin=json.dumps(graph(namespace, "llm", labelKey=ZONE, domain="zone")),
        )
        wait_for(plane, namespace, "Ready=True")


async def test_wide_kubectl_columns_show_worker_and_deployment_details(
    plane: ControlPlane, namespace: str
) -> None:
    card = {"draining": False, "engine_silent": True, "model": "llama", "role": "decode"}
    plane.apply(
        {
            "apiVersion": "kvrouter.dev/v1alpha1",
            "kind": "KvrouterWorker",
            "metadata": {"namespace": namespace, "name": "fleet-1"},
            "spec": {"card": card, "withdrawn": False, "lease_s": 60.0},
        }
    )
    assert wide(plane, namespace, "kvw")["ENGINESILENT"] == "true"
    async with operator(plane, namespace, "one"):
        spec = graph(namespace, "llm", labelKey=ZONE, domain="zone")
        spec["spec"]["components"] = spec["spec"]["components"][:1]
        plane.apply(spec)
        wait_for(plane, namespace, "Ready=True")
        row = wide(plane, namespace, "dgd")
        assert (row["READY"], row["PLACED"], row["REASON"]) == ("True", "Unknown", "AllPodsReady")
        assert row["AVAILABLE"] == "False"
        assert row["MESSAGE"] == "all 1 pods are Ready"


def wide(plane: ControlPlane, namespace: str, kind: str) -> dict[str, str]:
    """The only row of a wide table, by the columns' names."""
    head, row = plane.kubectl("get", kind, "--namespace", namespace, "--output", "wide").splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    ends = [*starts[1:], None]
    return {head[start:end].strip(): row[start:end].strip() for start, end in zip(starts, ends, strict=True)}


def warnings(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    return [event for event in events(plane, namespace) if event["reason"] == "SpecWarning"]
