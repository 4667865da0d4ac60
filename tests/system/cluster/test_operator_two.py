"""Two operators on one namespace: the second one stands back, and says so."""

import json

import httpx
import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import (
    WAIT,
    Operator,
    account_with_roles,
    graph,
    install_crds,
    operator,
    reasons,
)
from tests.system.cluster.webhooks import until_reported
from tests.testing.processes import eventually

OTHERS = ("--lease-name", "another", "--image", "example.com/another:1")


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_a_second_operator_stands_back_until_deployments_are_handed_over(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    leads = ("wait", "dgd/llm", "--namespace", namespace, WAIT)
    async with operator(plane, namespace, "one", kubeconfig=account) as one:
        plane.apply(graph(namespace, "llm"))
        plane.kubectl(*leads, "--for=condition=Ready")
        before = versions(plane, namespace)
        async with operator(plane, namespace, "two", *OTHERS) as two:

            async def has_said() -> bool:
                return "OtherOperator" in reasons(plane, namespace) and await stood_back(two) == 1

            await eventually(has_said)
            await until_reported(two, f"operator_stands_back deployment={namespace}/llm")
            plane.kubectl("scale", "deployment/llm-decode", "--replicas=1", "--namespace", namespace)
            await eventually(lambda: is_scaled(plane, namespace, 3))
            assert images(plane, namespace) == {"example.com/kvrouter:test"}
            assert versions(plane, namespace).keys() == before.keys()
            assert await stood_back(one) == 0

            mine = {"status": {"operator": f"{namespace}/another"}}
            patch = ("--subresource=status", "--type=merge", "--patch", json.dumps(mine))
            plane.kubectl("patch", "dgd", "llm", "--namespace", namespace, *patch)

            async def is_handed_over() -> bool:
                is_other = images(plane, namespace) == {"example.com/another:1"}
                return is_other and (await stood_back(one), await stood_back(two)) == (1, 0)

            await eventually(is_handed_over)
            assert "forbidden" not in one.log


async def is_scaled(plane: ControlPlane, namespace: str, replicas: int) -> bool:
    found = plane.read("deployment", "llm-decode", "--namespace", namespace)
    return bool(found["spec"]["replicas"] == replicas)


async def stood_back(replica: Operator) -> int:
    """How many deployments this operator leaves to another one."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{replica.port('http')}", timeout=60.0) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    name = "kvrouter_operator_stood_back "
    return int(float(next(line for line in lines if line.startswith(name)).removeprefix(name)))


def versions(plane: ControlPlane, namespace: str) -> dict[str, int]:
    found = plane.read("deployments", "--namespace", namespace)["items"]
    return {each["metadata"]["name"]: each["metadata"]["generation"] for each in found}


def images(plane: ControlPlane, namespace: str) -> set[str]:
    found = plane.read("deployments", "--namespace", namespace)["items"]
    return {main["image"] for each in found for main in each["spec"]["template"]["spec"]["containers"]}
