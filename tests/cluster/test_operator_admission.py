"""The admission door of the operator's replicas, asked by a real API server."""

import asyncio
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane, KubectlError
from tests.cluster.operators import Operator, graph, install_crds, operator
from tests.support.processes import eventually, free_ports

NAME = "kvrouter-operator"
SECRET = "kvrouter-operator-certificate"
UNKNOWN = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_follower_refuses_what_cannot_be_and_admits_the_rest_with_a_certificate_of_its_own(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(2)
    name = f"{NAME}-{namespace}"
    plane.lead_service(namespace, NAME)
    plane.apply(webhook(namespace, name, port + 1))
    own = ("--certificate-secret", SECRET, "--webhook", name)
    try:
        async with operator(plane, namespace, "one", *own, "--admission-port", str(port)) as one:
            await until_told(one, "operator_leads")
            trusted = bundle(plane, name)
            async with operator(plane, namespace, "two", *own, "--admission-port", str(port + 1)) as two:
                await until_told(two, "kind=admission")
                assert bundle(plane, name) == trusted
                with pytest.raises(
                    KubectlError, match="this cluster knows no ClusterTopologyBinding"
                ) as refused:
                    await asyncio.to_thread(plane.apply, graph(namespace, "llm", **UNKNOWN))
                assert "clusterTopologyName" in refused.value.said
                await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
                assert "admission_refused" in two.log
                assert "operator_leads" not in two.log

        with pytest.raises(KubectlError, match="failed calling webhook"):
            plane.apply(graph(namespace, "other"))
    finally:
        plane.kubectl("delete", "validatingwebhookconfiguration", name)


async def test_a_certificate_that_somebody_spoilt_is_made_anew_at_the_next_start(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(1)
    name = f"{NAME}-{namespace}"
    plane.lead_service(namespace, NAME)
    plane.apply(webhook(namespace, name, port))
    spoilt = {"tls.crt": "bm9uZQ==", "tls.key": "bm9uZQ=="}
    metadata = {"namespace": namespace, "name": SECRET}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": spoilt}
    plane.apply({**secret, "type": "kubernetes.io/tls"})
    own = ("--certificate-secret", SECRET, "--webhook", name, "--admission-port", str(port))
    try:
        async with operator(plane, namespace, "one", *own) as one:
            await until_told(one, "kind=admission")
            await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
    finally:
        plane.kubectl("delete", "validatingwebhookconfiguration", name)


async def until_told(replica: Operator, words: str) -> None:
    async def is_told() -> bool:
        assert replica.process.returncode is None, replica.log
        return words in replica.log

    await eventually(is_told)


def bundle(plane: ControlPlane, name: str) -> str:
    found = plane.read("validatingwebhookconfiguration", name)
    return str(found["webhooks"][0]["clientConfig"]["caBundle"])


def webhook(namespace: str, name: str, port: int) -> dict[str, Any]:
    rule = {
        "apiGroups": ["nvidia.com"],
        "apiVersions": ["v1beta1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["dynamographdeployments"],
    }
    service = {"namespace": namespace, "name": NAME, "path": "/validate", "port": port}
    one = {
        "name": "deployments.kvrouter.dev",
        "clientConfig": {"service": service},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [rule],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 10,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [one],
    }
