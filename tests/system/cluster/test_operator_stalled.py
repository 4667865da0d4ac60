"""What kstatus, and so Flux, makes of a deployment: done, getting on, or failed until somebody acts."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import graph, install_crds, operator, until_recorded
from tests.system.cluster.pods import BY_HAND
from tests.system.cluster.refusals import MISTAKES, with_main
from tests.testing.processes import eventually

COMPONENT = "kvrouter.dev/component"


def kstatus(found: Mapping[str, Any]) -> str:
    """``Current``, ``InProgress`` or ``Failed``, by the rules of kstatus for kinds that it does not know."""
    status = found.get("status", {})
    observed = status.get("observedGeneration")
    if observed is not None and observed != found["metadata"]["generation"]:
        return "InProgress"
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if holds.get("Reconciling") == "True":
        return "InProgress"
    if holds.get("Stalled") == "True":
        return "Failed"
    return "Current" if holds.get("Ready", "True") == "True" else "InProgress"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_kstatus_is_in_progress_until_an_operator_reconciles(
    plane: ControlPlane, namespace: str
) -> None:
    plane.apply(graph(namespace, "llm"))
    assert kstatus(plane.read("dgd", "llm", "--namespace", namespace)) == "InProgress"
    async with operator(plane, namespace, "one"):
        await until(plane, namespace, "Current")


async def test_kstatus_is_failed_for_refusals_until_fixed(plane: ControlPlane, namespace: str) -> None:
    good = graph(namespace, "llm")
    incomplete = deepcopy(good)
    incomplete["spec"]["components"][2]["podTemplate"]["spec"]["containers"] = []
    mistake, _ = MISTAKES["a quantity"]
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "few"}}
    async with operator(plane, namespace, "one"):
        for bad, reason in ((incomplete, "SpecInvalid"), (with_main(good, mistake), "WriteRefused")):
            write(plane, bad) if reason == "WriteRefused" else plane.apply(bad)
            await until(plane, namespace, "Failed", reason)
            write(plane, good)
            await until(plane, namespace, "Current", but_never="Failed")
        plane.apply({**quota, "spec": {"hard": {"pods": "7"}}})
        more = deepcopy(good)
        more["spec"]["components"][2]["replicas"] = 4
        write(plane, more)
        await until(plane, namespace, "Failed", "PodsRefused")
        write(plane, good)
        await until(plane, namespace, "Current", but_never="Failed")


async def test_kstatus_is_failed_for_pods_that_do_not_start(plane: ControlPlane, namespace: str) -> None:
    good = graph(namespace, "llm")
    by_hand = deepcopy(good)
    decode = by_hand["spec"]["components"][2]
    decode["podTemplate"]["metadata"] = {"labels": BY_HAND}
    async with operator(plane, namespace, "one"):
        plane.apply(good)
        await until(plane, namespace, "Current")
        write(plane, by_hand)
        await until(plane, namespace, "InProgress", "Updating", condition="Reconciling")
        name = await new_pod(plane, namespace)
        waiting = {"waiting": {"reason": "InvalidImageName", "message": "no such form"}}
        container = {"name": "main", "state": waiting, "image": "", "imageID": "", "ready": False}
        status = {"status": {"containerStatuses": [{**container, "restartCount": 0}]}}
        patch = ("--subresource=status", "--type=merge", "--patch", json.dumps(status))
        plane.kubectl("patch", "pod", name, "--namespace", namespace, *patch)
        await until(plane, namespace, "Failed", "PodsCannotStart")
        await until_recorded(plane, namespace, "PodsCannotStart")
        write(plane, good)
        await until(plane, namespace, "Current", but_never="Failed")
        decode["progressDeadlineSeconds"] = 2
        write(plane, by_hand)
        await until(plane, namespace, "Failed", "ProgressDeadlineExceeded")
        await until_recorded(plane, namespace, "ProgressDeadlineExceeded")
        write(plane, good)
        await until(plane, namespace, "Current", but_never="Failed")


async def until(
    plane: ControlPlane,
    namespace: str,
    expected: str,
    reason: str = "",
    *,
    condition: str = "Stalled",
    but_never: str = "",
) -> None:
    """Return once kstatus says so, for this reason of this condition."""
    found: dict[str, Any] = {}

    async def is_so() -> bool:
        nonlocal found
        found = plane.read("dgd", "llm", "--namespace", namespace)
        said = kstatus(found)
        assert said != but_never, found["status"]
        conditions = found.get("status", {}).get("conditions", [])
        why = {each["type"]: each["reason"] for each in conditions}.get(condition, "")
        return said == expected and (not reason or why == reason)

    try:
        await eventually(is_so)
    except AssertionError as error:
        raise AssertionError(f"{expected} {reason}: {found.get('status')}") from error


async def new_pod(plane: ControlPlane, namespace: str) -> str:
    """The name of a decode worker's pod that KWOK leaves alone."""
    names: list[str] = []

    async def is_there() -> bool:
        selector = ",".join(f"{key}={value}" for key, value in {**BY_HAND, COMPONENT: "decode"}.items())
        pods = plane.read("pods", "--namespace", namespace, "--selector", selector)["items"]
        names[:] = [pod["metadata"]["name"] for pod in pods]
        return bool(names)

    await eventually(is_there)
    return names[0]


def write(plane: ControlPlane, spec: Mapping[str, Any]) -> None:
    plane.kubectl("replace", "--filename", "-", stdin=json.dumps(spec))
