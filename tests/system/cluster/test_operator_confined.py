"""An operator of one namespace, without a role for nodes: what it does, and what it says that it cannot."""

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, ZONE
from tests.system.cluster.operators import WAIT, account_with_roles, graph, install_crds, operator
from tests.testing.processes import eventually


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_confined_operator_reports_its_limits_without_node_rights(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(
        plane, namespace, "kvrouter-operator", watchNamespace=namespace, rbac={"nodes": False}
    )
    user = f"system:serviceaccount:{namespace}:kvrouter-operator"
    async with operator(plane, namespace, "one", kubeconfig=account):
        with new_namespace(plane) as other:
            plane.apply(graph(other, "llm"))
            plane.apply(graph(namespace, "zoned", labelKey=ZONE, domain="zone"))
            plane.apply(graph(namespace, "racked", labelKey=RACK, domain="rack"))
            wait(plane, namespace, "zoned", "Ready")
            wait(plane, namespace, "zoned", "DomainBalanced")  # Kubernetes copies zones itself
            wait(plane, namespace, "racked", "TopologyResolved=False")

            async def is_reported() -> bool:
                found = plane.read("dgd", "racked", "--namespace", namespace)["status"]["conditions"]
                messages = {each["type"]: each["message"] for each in found}
                reported = messages["TopologyResolved"]
                return "The operator cannot read nodes" in reported and user in reported

            await eventually(is_reported)
            assert plane.read("deployments", "--namespace", other)["items"] == []
            plane.kubectl("delete", "dgd", "llm", "--namespace", other)
        plane.kubectl("delete", "dgd", "zoned", "racked", "--namespace", namespace)
        for kind in ("deployments", "services", "roles"):
            plane.kubectl(
                "wait", "--for=delete", kind, "-l", "kvrouter.dev/deployment", "--namespace", namespace, WAIT
            )


def wait(plane: ControlPlane, namespace: str, name: str, condition: str) -> None:
    plane.kubectl("wait", f"--for=condition={condition}", f"dgd/{name}", "--namespace", namespace, WAIT)
