"""Two operators of two classes in one namespace: each looks after its own deployments alone."""

import asyncio

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import graph, install_crds, operator, wait_for
from tests.testing.processes import eventually

CLASS = "kvrouter.dev/class"
BLUE = ("--lease-name", "blue", "--class", "blue", "--image", "example.com/blue:1")


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_each_operator_manages_its_own_class_and_a_class_may_change(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one") as one, operator(plane, namespace, "two", *BLUE) as two:
        plane.apply(of_class(namespace, "theirs", "dynamo"))
        plane.apply(of_class(namespace, "bluish", "blue"))
        plane.apply(graph(namespace, "plain"))
        for name in ("plain", "bluish"):
            await asyncio.to_thread(wait_for, plane, namespace, "Ready", name)
        assert image(plane, namespace, "plain") == "example.com/kvrouter:test"
        assert image(plane, namespace, "bluish") == "example.com/blue:1"
        assert plane.read("dgd", "theirs", "--namespace", namespace)["status"] == {"observedGeneration": -1}
        names = [each["metadata"]["name"] for each in deployments(plane, namespace)]
        assert not [name for name in names if name.startswith("theirs")]
        assert f"{namespace}/bluish" not in one.log
        assert f"{namespace}/plain" not in two.log

        before = {each["metadata"]["uid"] for each in deployments(plane, namespace)}
        plane.kubectl("annotate", "dgd", "plain", f"{CLASS}=blue", "--namespace", namespace)

        async def is_blue() -> bool:
            return image(plane, namespace, "plain") == "example.com/blue:1"

        await eventually(is_blue)
        assert {each["metadata"]["uid"] for each in deployments(plane, namespace)} == before


def of_class(namespace: str, name: str, of: str) -> dict[str, object]:
    found = graph(namespace, name)
    found["metadata"]["annotations"] = {CLASS: of}
    return found


def deployments(plane: ControlPlane, namespace: str) -> list[dict[str, dict[str, str]]]:
    found: list[dict[str, dict[str, str]]] = plane.read("deployments", "--namespace", namespace)["items"]
    return found


def image(plane: ControlPlane, namespace: str, name: str) -> str:
    spec = plane.read("deployment", f"{name}-frontend", "--namespace", namespace)["spec"]
    return str(spec["template"]["spec"]["containers"][0]["image"])
