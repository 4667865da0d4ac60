"""The admission door of the operator's replicas, asked by a real API server."""

import asyncio
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane, KubectlError
from tests.cluster.operators import graph, install_crds, operator
from tests.cluster.webhooks import (
    SECRET,
    SERVICE,
    name_of,
    on_deployments,
    own_certificate,
    trusted,
    until_told,
)
from tests.support.processes import free_ports

VALIDATING = "validatingwebhookconfiguration"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_follower_refuses_what_cannot_be_and_admits_the_rest_with_a_certificate_of_its_own(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(2)
    name = name_of(namespace)
    plane.lead_service(namespace, SERVICE)
    plane.apply(on_deployments(namespace, port + 1))
    with plane.deleting(VALIDATING, name):
        async with operator(plane, namespace, "one", *own_certificate(namespace, port)) as one:
            await until_told(one, "operator_leads")
            authority = trusted(plane, VALIDATING, name)
            async with operator(plane, namespace, "two", *own_certificate(namespace, port + 1)) as two:
                await until_told(two, "kind=admission")
                assert trusted(plane, VALIDATING, name) == authority != ""
                with pytest.raises(KubectlError, match="containers: is needed"):
                    await asyncio.to_thread(plane.apply, without_engine(namespace))
                await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
                assert "admission_refused" in two.log
                assert "operator_leads" not in two.log

        with pytest.raises(KubectlError, match="failed calling webhook"):
            plane.apply(graph(namespace, "other"))


async def test_a_certificate_that_somebody_spoilt_is_made_anew_at_the_next_start(
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
            await until_told(one, "kind=admission")
            await asyncio.to_thread(plane.apply, graph(namespace, "llm"))


def without_engine(namespace: str) -> dict[str, Any]:
    manifest = graph(namespace, "llm")
    manifest["spec"]["components"][1]["podTemplate"] = {}
    return manifest
