"""The admission door of the operator's replicas, asked by a real API server."""

import asyncio
import re
from itertools import count

import httpx
import pytest
from kubernetes.aio.client import ApiClient

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.nodes import RACK
from tests.system.cluster.operators import Operator, graph, install_crds, operator
from tests.system.cluster.pods import bound, pod, worker_name
from tests.system.cluster.webhooks import (
    SECRET,
    SERVICE,
    name_of,
    on_bindings,
    on_deployments,
    own_certificate,
    trusted,
    until_asked,
    until_reported,
    until_serving,
)
from tests.testing.processes import eventually, free_ports

VALIDATING = "validatingwebhookconfiguration"
MUTATING = "mutatingwebhookconfiguration"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_follower_answers_admission_with_its_own_certificate(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(2)
    name = name_of(namespace)
    plane.lead_service(namespace, SERVICE)
    plane.apply(on_deployments(namespace, port + 1))
    with plane.deleting(VALIDATING, name):
        async with operator(plane, namespace, "one", *own_certificate(namespace, port)) as one:
            await until_serving(one)
            authority = trusted(plane, VALIDATING, name)
            async with operator(plane, namespace, "two", *own_certificate(namespace, port + 1)) as two:
                await until_reported(two, "kind=admission")
                await until_asked(plane, namespace)
                assert trusted(plane, VALIDATING, name) == authority != ""
                await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
                await until_reported(two, "admission_refused")
                assert "operator_leads" not in two.log

        with pytest.raises(KubectlError, match="failed calling webhook"):
            plane.apply(graph(namespace, "other"))


async def test_the_binding_webhook_adds_nothing_if_policies_label_pods(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    port, name = free_ports(1), name_of(namespace)
    plane.lead_service(namespace, SERVICE)
    plane.apply(on_deployments(namespace, port), on_bindings(namespace, port))
    with plane.deleting(VALIDATING, name), plane.deleting(MUTATING, f"{name}-binding"):
        async with operator(plane, namespace, "one", *own_certificate(namespace, port)) as one:
            await until_serving(one)
            plane.apply(graph(namespace, "llm", labelKey=RACK, domain="rack"))
            numbers = count()

            async def is_left() -> bool:
                seen = await bound(plane, api, pod(namespace, worker_name("llm-prefill", next(numbers))))
                node = plane.read("node", seen["spec"]["nodeName"])
                is_labelled = seen["metadata"]["labels"].get(RACK) == node["metadata"]["labels"][RACK]
                return is_labelled and bool(await answers(one))

            await eventually(is_left)
            assert await answers(one) == {"left"}


async def answers(replica: Operator) -> set[str]:
    """What the replica answered about Bindings."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{replica.port('http')}", timeout=60.0) as client:
        page = (await client.get("/metrics")).text
    return set(re.findall(r'^kvrouter_operator_bindings_total\{answer="(\w+)"\} [1-9]', page, re.MULTILINE))


async def test_an_invalid_certificate_is_replaced_at_the_next_start(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(1)
    plane.lead_service(namespace, SERVICE)
    plane.apply(on_deployments(namespace, port))
    spoilt = {"tls.crt": "bm9uZQ==", "tls.key": "bm9uZQ=="}
    metadata = {"namespace": namespace, "name": SECRET}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": spoilt}
    plane.apply({**secret, "type": "kubernetes.io/tls"})
    with plane.deleting(VALIDATING, name_of(namespace)):
        async with operator(plane, namespace, "one", *own_certificate(namespace, port)) as one:
            await until_reported(one, "kind=admission")
            await until_asked(plane, namespace)
            await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
