"""The accounts that an operator with the shipped roles grants: what pods may do by them, and when they go."""

import pytest

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.operators import WAIT, account_with_roles, graph, install_crds, operator

CARDS = "kvrouterworkers.kvrouter.dev"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_pod_accounts_have_only_the_needed_rights_in_their_namespace(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with operator(plane, namespace, "one", kubeconfig=account) as replica:
        plane.apply(graph(namespace, "llm"))
        plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
        pods = plane.read("pods", "--namespace", namespace)["items"]
        accounts = {
            (each["metadata"]["labels"]["kvrouter.dev/component-type"], each["spec"]["serviceAccountName"])
            for each in pods
        }
        assert accounts == {
            ("frontend", "llm-frontends"),
            ("prefill", "llm-workers"),
            ("decode", "llm-workers"),
        }
        assert allowed(plane, namespace, "llm-workers", namespace) == {"get", "create", "update"}
        assert allowed(plane, namespace, "llm-frontends", namespace) == {"list", "watch", "delete"}
        assert allowed(plane, namespace, "llm-workers", "default") == set()
        plane.kubectl("delete", "rolebinding", "llm-workers", "--namespace", namespace)
        plane.kubectl("wait", "--for=create", "rolebinding/llm-workers", "--namespace", namespace, WAIT)
        assert "forbidden" not in replica.log


async def test_an_operator_over_nats_removes_the_pod_accounts(plane: ControlPlane, namespace: str) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm"))
        plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
    nats = ("--discovery", "nats", "--nats-server", "nats://nats:4222")
    async with operator(plane, namespace, "two", *nats):
        for kind in ("serviceaccount", "role", "rolebinding"):
            for name in ("llm-workers", "llm-frontends"):
                plane.kubectl("wait", "--for=delete", f"{kind}/{name}", "--namespace", namespace, WAIT)
        without_token = "--for=jsonpath={.spec.template.spec.automountServiceAccountToken}=false"
        plane.kubectl("wait", without_token, "deployment/llm-decode", "--namespace", namespace, WAIT)
    async with operator(plane, namespace, "three"):
        plane.kubectl("wait", "--for=create", "role/llm-workers", "--namespace", namespace, WAIT)
        plane.kubectl("delete", "dgd", "llm", "--namespace", namespace)
        plane.kubectl("wait", "--for=delete", "role/llm-workers", "--namespace", namespace, WAIT)


def allowed(plane: ControlPlane, namespace: str, account: str, where: str) -> set[str]:
    """What the account of a deployment in ``namespace`` may do with cards."""
    user = f"system:serviceaccount:{namespace}:{account}"

    def may(verb: str) -> bool:
        try:
            reported = plane.kubectl("auth", "can-i", verb, CARDS, "--as", user, "--namespace", where)
        except KubectlError:
            return False
        return reported.strip() == "yes"

    return {verb for verb in VERBS if may(verb)}
