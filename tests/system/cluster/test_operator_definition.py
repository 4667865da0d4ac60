"""Another project's definition of the same name: nothing takes it over, and the operator stands back."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helm_python import Config, HelmError

from tests.system.cluster.charted import reachable
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import CRDS, WAIT, Operator, graph, install_crds, operator
from tests.system.cluster.preflighted import preflight
from tests.system.cluster.refusals import with_main
from tests.system.cluster.webhooks import SERVICE, name_of, on_deployments, own_certificate, until_reported
from tests.testing.helm_chart import CHART
from tests.testing.processes import eventually, free_ports

NAME = "dynamographdeployments.nvidia.com"


@pytest.fixture
def fleets(own_plane: ControlPlane) -> Iterator[str]:
    """A namespace with another project's deployments."""
    with new_namespace(own_plane) as name:
        yield name


@pytest.fixture
def theirs(own_plane: ControlPlane) -> Iterator[dict[str, Any]]:
    """Another project's definition, as its Helm chart wrote it."""
    definition = another()
    own_plane.kubectl("delete", "crd", NAME, "--ignore-not-found", WAIT)
    own_plane.kubectl("create", "--field-manager=helm", "--filename", "-", stdin=json.dumps(definition))
    own_plane.kubectl("wait", "--for=condition=Established", f"crd/{NAME}", WAIT)
    own_plane.until_served(NAME)  # one that is deleted before its objects can be listed stays for minutes
    yield definition
    own_plane.kubectl("delete", "crd", NAME, "--ignore-not-found", WAIT)


def test_the_pages_commands_do_not_overwrite_a_foreign_definition(
    own_plane: ControlPlane, theirs: dict[str, Any]
) -> None:
    with pytest.raises(KubectlError, match='conflict with "helm"') as refused:
        own_plane.kubectl("apply", "--server-side", "--kustomize", str(CRDS))
    assert ".spec.versions" in refused.value.said
    assert versions(own_plane) == {"v1alpha1": True, "v1beta1": True}
    fields = own_plane.read("crd", NAME)["spec"]["versions"][1]["schema"]["openAPIV3Schema"]
    assert fields["properties"]["spec"]["properties"] == {"backendFramework": {"type": "string"}}
    own_plane.kubectl("delete", "crd", "--selector", "app.kubernetes.io/part-of=kvrouter")
    assert versions(own_plane) == {"v1alpha1": True, "v1beta1": True}


async def test_kubectl_explains_a_pod_template(plane: ControlPlane) -> None:
    install_crds(plane)
    at = "dynamographdeployment.spec.components.podTemplate"

    async def is_published() -> bool:
        """The API server publishes what it explains a moment after it serves the definition."""
        try:
            plane.kubectl("explain", at)
        except KubectlError:
            return False
        return True

    await eventually(is_published)
    said = plane.kubectl("explain", f"{at}.spec.containers.ports.containerPort")
    assert "FIELD: containerPort <integer>" in said
    assert "Number of port to expose on the pod's IP address." in said
    assert "tolerations\t<[]Object>" in plane.kubectl("explain", f"{at}.spec")


def test_a_pod_template_is_stored_as_written(plane: ControlPlane, namespace: str) -> None:
    """A null, a quantity with a fraction, a name twice, and fields of a later Kubernetes."""
    install_crds(plane)
    deployment = graph(namespace, "written")
    container = {
        "name": "main",
        "args": ["worker", "mock"],
        "command": None,
        "resources": {"limits": {"cpu": 0.5, "memory": "1Gi", "nvidia.com/gpu": 1}},
        "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
        "ports": [{"containerPort": 1, "ofLater": {"a": 1}}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}},
        "ofLater": [1],
    }
    template = {"metadata": {"creationTimestamp": None}, "spec": {"containers": [container], "ofLater": 1}}
    deployment["spec"]["components"][2]["podTemplate"] = template
    plane.kubectl("create", "--filename", "-", stdin=json.dumps(deployment))
    stored = plane.read("dgd", "written", "--namespace", namespace)["spec"]["components"][2]["podTemplate"]
    assert stored == template


def test_the_definition_refuses_a_value_of_a_wrong_type(plane: ControlPlane, namespace: str) -> None:
    install_crds(plane)
    deployment = with_main(graph(namespace, "wrong"), {"ports": [{"containerPort": "http"}]})
    with pytest.raises(KubectlError, match=r"containers\[0\]\.ports\[0\]\.containerPort: expected numeric"):
        plane.apply(deployment)


async def test_the_operator_stands_back_until_the_definition_is_its_own(
    own_plane: ControlPlane, theirs: dict[str, Any], fleets: str
) -> None:
    plane, port = own_plane, free_ports(1)
    plane.lead_service(fleets, SERVICE)
    plane.apply(on_deployments(fleets, port))
    with plane.deleting("validatingwebhookconfiguration", name_of(fleets)):
        async with operator(plane, fleets, "one", *own_certificate(fleets, port)) as one:
            await until_reported(one, "definition_foreign")
            await until_reported(one, "is another project's: it has no annotation kvrouter.dev/definition")
            await until_reported(one, "ready kind=admission")

            async def is_let_pass() -> bool:
                try:
                    await asyncio.to_thread(plane.apply, of_theirs(fleets))
                except KubectlError as error:
                    if "failed calling webhook" not in error.said:
                        raise
                    return False
                return True

            await eventually(is_let_pass)  # kvrouter's own rules would refuse what has no components
            assert "kvrouter_operator_definition_foreign 1.0" in await metrics(one)
            assert (await readiness(one)) == 200  # else its webhook would hold up the other project's writes
            there = plane.read("dgd", "theirs", "--namespace", fleets)
            assert "status" not in there
            assert plane.read("events", "--namespace", fleets)["items"] == []
            code, reported = await asyncio.to_thread(preflight, plane)
            assert code == 1
            (line,) = [line for line in reported.splitlines() if line.startswith(NAME)]
            assert "another project's definition, written by helm; it serves v1alpha1, v1beta1" in line
            assert "1 objects in 1 namespaces" in line
            assert "--force-conflicts" not in reported

            plane.kubectl("delete", "crd", NAME, WAIT)
            await until_reported(one, f"{NAME} is not installed")
            install_crds(plane)
            assert (await asyncio.to_thread(preflight, plane))[0] == 0
            await until_reported(one, "definition_own")
            plane.apply(graph(fleets, "llm"))
            plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", fleets, WAIT)

            plane.kubectl("annotate", "crd", NAME, "kvrouter.dev/definition-")
            before = one.log.count("definition_foreign")

            async def stands_back_again() -> bool:
                return one.log.count("definition_foreign") > before

            await eventually(stands_back_again)
            plane.kubectl("delete", "deployment", "llm-decode", "--namespace", fleets, WAIT)
            plane.kubectl("annotate", "crd", NAME, "kvrouter.dev/definition=0.1.0")
            decode = ("deployment/llm-decode", "--namespace", fleets, WAIT)
            await asyncio.to_thread(plane.kubectl, "wait", "--for=create", *decode)
            while_back = one.log.rpartition("definition_foreign")[2].partition("definition_own")[0]
            assert "deployment_applied" not in while_back
            assert await one.end() == 0


async def test_helm_installs_nothing_beside_a_foreign_definition(
    own_plane: ControlPlane, theirs: dict[str, Any], fleets: str
) -> None:
    with (
        Config(kubeconfig_path=own_plane.admin, namespace=fleets) as helm,
        pytest.raises(HelmError, match="is another project's definition"),
    ):
        await asyncio.to_thread(helm.install, CHART, "kvrouter", reachable(), namespace=fleets)
    assert own_plane.read("deployments", "--namespace", fleets)["items"] == []
    assert versions(own_plane) == {"v1alpha1": True, "v1beta1": True}


def another() -> dict[str, Any]:
    """A definition of the same name with another schema, and a version more."""
    fields = {"type": "object", "properties": {"backendFramework": {"type": "string"}}}
    schema = {"type": "object", "properties": {"spec": fields}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": "nvidia.com",
            "scope": "Namespaced",
            "names": {
                "kind": "DynamoGraphDeployment",
                "plural": "dynamographdeployments",
                "singular": "dynamographdeployment",
                "shortNames": ["dgd"],
            },
            "versions": [
                {"name": name, "served": True, "storage": is_stored, "schema": {"openAPIV3Schema": schema}}
                for name, is_stored in (("v1alpha1", False), ("v1beta1", True))
            ],
        },
    }


def of_theirs(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"namespace": namespace, "name": "theirs"},
        "spec": {"backendFramework": "vllm"},
    }


def versions(plane: ControlPlane) -> dict[str, bool]:
    return {each["name"]: each["served"] for each in plane.read("crd", NAME)["spec"]["versions"]}


async def metrics(one: Operator) -> str:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.port('http')}", timeout=60.0) as client:
        return (await client.get("/metrics")).text


async def readiness(one: Operator) -> int:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.port('http')}", timeout=60.0) as client:
        return (await client.get("/readyz")).status_code
