"""Webhooks that ask an operator of these tests, of one namespace each."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.operators import Operator, operator
from tests.testing.processes import eventually, free_ports

SERVICE = "kvrouter-operator"
SECRET = "kvrouter-operator-certificate"
API_VERSION = "admissionregistration.k8s.io/v1"


def name_of(namespace: str) -> str:
    """What both are called, but for the end of the second's name: they are the whole cluster's."""
    return f"{SERVICE}-{namespace}"


def own_certificate(namespace: str, port: int) -> tuple[str, ...]:
    """Flags of an operator that is asked on this port, with a certificate of its own."""
    return (
        *("--certificate-secret", SECRET, "--webhook", name_of(namespace)),
        *("--admission-port", str(port)),
    )


def on_deployments(namespace: str, port: int) -> dict[str, Any]:
    """A ValidatingWebhookConfiguration."""
    rule = {
        "apiGroups": ["nvidia.com"],
        "apiVersions": ["v1beta1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["dynamographdeployments"],
    }
    one = _webhook(namespace, "deployments", "/validate", port, rule)
    return _configuration("Validating", name_of(namespace), {**one, "timeoutSeconds": 10})


def on_bindings(namespace: str, port: int) -> dict[str, Any]:
    """A MutatingWebhookConfiguration, which holds up no pod."""
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods/binding"],
    }
    one = _webhook(namespace, "bindings", "/bind", port, rule)
    gentle = {"failurePolicy": "Ignore", "timeoutSeconds": 2}
    return _configuration("Mutating", f"{name_of(namespace)}-binding", {**one, **gentle})


def trusted(plane: ControlPlane, configuration: str, name: str) -> str:
    """The authority that the first webhook of a configuration trusts; empty for none."""
    (webhook,) = plane.read(configuration, name)["webhooks"]
    return str(webhook["clientConfig"].get("caBundle", ""))


async def until_asked(plane: ControlPlane, namespace: str) -> None:
    """Return once the API server asks an operator: it refuses what the definition allows."""
    metadata = {"namespace": namespace, "name": "asked"}
    wrong = {"components": [{"name": "decode", "type": "decode", "replicas": 0}]}
    of = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"}
    stored = json.dumps({**of, "metadata": metadata, "spec": wrong})

    async def is_asked() -> bool:
        try:
            plane.kubectl("create", "--dry-run=server", "--filename", "-", stdin=stored)
        except KubectlError as error:
            return "podTemplate.spec.containers: is needed" in error.said
        return False

    await eventually(is_asked)


@asynccontextmanager
async def judging(plane: ControlPlane, namespace: str, account: Path | None) -> AsyncIterator[Operator]:
    """An operator with this account's rights that the API server asks about the namespace's deployments."""
    plane.lead_service(namespace, SERVICE)
    port, folder = free_ports(1), plane.folder / "keys" / namespace
    folder.mkdir()
    plane.authority.for_server(f"{SERVICE}.{namespace}.svc").write(folder, "tls")
    configuration = on_deployments(namespace, port)
    configuration["webhooks"][0]["clientConfig"]["caBundle"] = plane.authority.bundle()
    flags = ("--certificate", str(folder), "--admission-port", str(port))
    with plane.deleting("validatingwebhookconfiguration", name_of(namespace)):
        plane.apply(configuration)
        async with operator(plane, namespace, "one", *flags, kubeconfig=account) as replica:
            await until_asked(plane, namespace)
            yield replica


async def until_serving(*replicas: Operator) -> None:
    """Return once the first one leads, and all have their admission doors open."""
    await until_reported(replicas[0], "operator_leads")
    for replica in replicas:
        await until_reported(replica, "kind=admission")


async def until_reported(replica: Operator, words: str) -> None:
    """Return once this is in a replica's log, or fail when it ended."""

    async def is_reported() -> bool:
        assert replica.process.returncode is None, replica.log
        return words in replica.log

    await eventually(is_reported)


def _webhook(namespace: str, of: str, path: str, port: int, rule: dict[str, Any]) -> dict[str, Any]:
    service = {"namespace": namespace, "name": SERVICE, "path": path, "port": port}
    return {
        "name": f"{of}.kvrouter.dev",
        "clientConfig": {"service": service},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [rule],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }


def _configuration(kind: str, name: str, webhook: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": f"{kind}WebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [webhook],
    }
