"""NetworkPolicies in a real API server, written with the chart's rights. No plugin enforces them here."""

import asyncio

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import account_with_roles, graph, install_crds, operator, wait_for
from tests.testing.helm_chart import of_kind, rendered
from tests.testing.network_policies import OUTSIDE, Peer, is_allowed
from tests.testing.processes import eventually

ANY_PORT = 41_234


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_network_policies_exist_only_while_enabled(plane: ControlPlane, namespace: str) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with operator(plane, namespace, "one", "--network-policies", kubeconfig=account):
        plane.apply(graph(namespace, "llm"))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        found = plane.read("networkpolicies", "--namespace", namespace)["items"]
        assert {each["metadata"]["name"] for each in found} == {"llm-frontend", "llm-prefill", "llm-decode"}
        pods = {
            each["metadata"]["labels"]["kvrouter.dev/component"]: Peer(namespace, each["metadata"]["labels"])
            for each in plane.read("pods", "--namespace", namespace)["items"]
        }
        assert is_allowed(found, pods["frontend"], pods["prefill"], ANY_PORT)
        assert is_allowed(found, pods["decode"], pods["prefill"], ANY_PORT)
        assert is_allowed(found, OUTSIDE, pods["frontend"], 8000)
        assert not is_allowed(found, OUTSIDE, pods["decode"], ANY_PORT)
    async with operator(plane, namespace, "other", kubeconfig=account):

        async def are_gone() -> bool:
            return not plane.read("networkpolicies", "--namespace", namespace)["items"]

        await eventually(are_gone)


def test_the_charts_network_policies_are_stored_unchanged(plane: ControlPlane, namespace: str) -> None:
    values = {"networkPolicies": {"enabled": True}, "nats": {"enabled": True}}
    own = of_kind(rendered(values, namespace=namespace), "NetworkPolicy")
    assert len(own) == 2
    plane.apply(*own)
    for each in own:
        name = each["metadata"]["name"]
        there = plane.read("networkpolicy", name, "--namespace", namespace)
        for direction in ("ingress", "egress"):
            assert there["spec"].get(direction, []) == each["spec"][direction]
