"""What an operator leaves behind is removed before it is uninstalled, and nothing of another one's."""

import asyncio
import os
import sys

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK
from tests.system.cluster.operators import WAIT, account_with_roles, graph, install_crds, operator
from tests.testing.processes import eventually

OF_OPERATOR = "kvrouter.dev/operator"
KINDS = "mutatingadmissionpolicies,mutatingadmissionpolicybindings,kvrouternodeplaces"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_clean_up_removes_a_running_operators_policies(plane: ControlPlane, namespace: str) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with operator(plane, namespace, "one", kubeconfig=account) as replica:
        plane.apply(graph(namespace, "llm", labelKey=RACK, domain="rack"))
        plane.kubectl("wait", "--for=condition=DomainBalanced", "dgd/llm", "--namespace", namespace, WAIT)
        (policy,) = owned(plane, namespace, "mutatingadmissionpolicies")
        (binding,) = owned(plane, namespace, "mutatingadmissionpolicybindings")
        assert policy == binding
        other = f"{policy}-other"
        stray = plane.read("mutatingadmissionpolicies", policy)
        labels = {**stray["metadata"]["labels"], OF_OPERATOR: "another"}
        stray["metadata"] = {"name": other, "labels": labels}
        plane.apply(stray)
        try:
            arguments = ("--kubeconfig", str(account), "--lease-namespace", namespace)
            first = await clean_up(*arguments)
            assert sorted(first.splitlines()) == [
                f"KvrouterNodePlaces {policy}",
                f"MutatingAdmissionPolicy {policy}",
                f"MutatingAdmissionPolicyBinding {policy}",
            ]

            async def has_stopped() -> bool:
                return not replica.is_leading

            await eventually(has_stopped)
            # One that goes on running leads again once the lease has run out, and writes its policies.
            assert await replica.end() == 0
            assert owned(plane, namespace, KINDS) == []
            assert plane.read("mutatingadmissionpolicies", other)
            assert (await clean_up(*arguments)).strip() == "nothing to remove"
        finally:
            plane.kubectl("delete", "mutatingadmissionpolicy", other)
    found = plane.read("deployments", "--namespace", namespace)["items"]
    assert {each["metadata"]["name"] for each in found} == {"llm-frontend", "llm-prefill", "llm-decode"}


def owned(plane: ControlPlane, namespace: str, kinds: str) -> list[str]:
    """The names of what operators of this namespace wrote for the whole cluster."""
    found = plane.read(kinds)["items"]
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in found}
    return [name for name, of in labels.items() if of.get(OF_OPERATOR, "").startswith(f"{namespace}.")]


async def clean_up(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "operator", "clean-up", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "POD_NAME": "uninstall"},
    )
    reported, _ = await process.communicate()
    assert process.returncode == 0
    return reported.decode()
