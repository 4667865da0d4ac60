"""The webhook on bindings, where the cluster copies their labels and has no policies to write them."""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane, Features
from tests.system.cluster.grove import install_grove, topology
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, ZONE
from tests.system.cluster.operators import LATE, graph, install_crds, operator, until_replaced, wait_for
from tests.system.cluster.pods import bound, pod, worker_name
from tests.system.cluster.webhooks import (
    SERVICE,
    name_of,
    on_bindings,
    on_deployments,
    own_certificate,
    trusted,
    until_reported,
    until_serving,
)
from tests.testing.processes import eventually, free_ports

FABRIC = {"zone": ZONE, "rack": RACK, "block": "example.com/block"}
LABELS = {domain: f"grove.io/topology.{domain}" for domain in FABRIC}
FORGED = dict.fromkeys(LABELS.values(), "forged")


@pytest.fixture(scope="module")
def plane(plane_of_1_35: ControlPlane) -> ControlPlane:
    install_crds(plane_of_1_35)
    install_grove(plane_of_1_35)
    return plane_of_1_35


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    with new_namespace(plane) as name:
        plane.lead_service(name, SERVICE)
        yield name


def test_the_cluster_copies_binding_labels_and_has_no_policies(plane: ControlPlane) -> None:
    assert plane.features() == Features(mutating_admission_policy=False, copies_binding_labels=True)


async def test_a_follower_labels_every_pod_with_its_place_at_binding(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    port = free_ports(2)
    name = name_of(namespace)
    plane.apply(on_deployments(namespace, port + 1), on_bindings(namespace, port + 1))
    with (
        plane.deleting("validatingwebhookconfiguration", name),
        plane.deleting("mutatingwebhookconfiguration", f"{name}-binding"),
    ):
        async with AsyncExitStack() as stack:
            leader = operator(plane, namespace, "one", *own_certificate(namespace, port))
            one = await stack.enter_async_context(leader)
            await until_serving(one)
            follower = operator(plane, namespace, "two", *own_certificate(namespace, port + 1))
            two = await stack.enter_async_context(follower)
            await until_reported(two, "kind=admission")
            assert trusted(plane, "mutatingwebhookconfiguration", f"{name}-binding") == trusted(
                plane, "validatingwebhookconfiguration", name
            )
            plane.apply(topology("fabric", FABRIC))
            plane.apply(graph(namespace, "llm", clusterTopologyName="fabric", domain="zone"))
            seen = await until_in_force(plane, api, namespace)
            of_node = plane.read("node", seen["spec"]["nodeName"])["metadata"]["labels"]
            of_pod = seen["metadata"]["labels"]
            assert {domain: of_pod[label] for domain, label in LABELS.items()} == {
                "zone": of_node[ZONE],
                "rack": of_node[RACK],
                "block": "",
            }
            other = await bound(plane, api, pod(namespace, worker_name("llm-frontend", 1), FORGED))
            assert {key: other["metadata"]["labels"][key] for key in FORGED} == FORGED

            for condition in ("Ready=True", "TopologyResolved=True"):
                wait_for(plane, namespace, condition)

            async def are_in_time() -> bool:  # a webhook that takes over a second labels none
                late = (await one.metrics()).total(LATE)
                await until_replaced(plane, namespace, "decode")
                for condition in ("TopologyResolved=True", "DomainBalanced=True"):
                    wait_for(plane, namespace, condition)
                return (await one.metrics()).total(LATE) == late

            await eventually(are_in_time)
            assert "operator_leads" not in two.log
            page = await two.metrics()
            for answer in ("labelled", "left"):
                assert page.total("operator_bindings_total", answer=answer)


@pytest.mark.parametrize("listens", [False, True])
async def test_an_unresponsive_binding_webhook_blocks_no_pod(
    plane: ControlPlane, api: ApiClient, namespace: str, listens: bool
) -> None:
    before = passed_over(plane)
    numbers = count()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        if not listens:
            listener.close()
        with plane.deleting("mutatingwebhookconfiguration", f"{name_of(namespace)}-binding"):
            plane.apply(on_bindings(namespace, port))

            async def is_passed_over() -> bool:
                await bound(plane, api, pod(namespace, worker_name("llm-prefill", next(numbers))))
                return passed_over(plane) > before

            await eventually(is_passed_over)


def passed_over(plane: ControlPlane) -> float:
    """How often the API server went on without an answer about a Binding."""
    reported = 'apiserver_admission_webhook_fail_open_count{name="bindings.kvrouter.dev"'
    lines = plane.kubectl("get", "--raw", "/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(reported))


async def until_in_force(plane: ControlPlane, api: ApiClient, namespace: str) -> dict[str, Any]:
    """What the first watch event tells of a pod that got its place when it was bound, and no sooner."""
    numbers = count()
    seen: dict[str, Any] = {}

    async def is_in_force() -> bool:
        stray = pod(namespace, worker_name("llm-prefill", next(numbers)), FORGED)
        seen.update(await bound(plane, api, stray))
        return bool(seen["metadata"]["labels"][LABELS["zone"]] != "forged")

    await eventually(is_in_force)
    return seen
