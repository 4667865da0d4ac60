"""A change of workers' templates passes zone by zone through a fleet with ``spec.upgrade``."""

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE, ZONES
from tests.system.cluster.operators import (
    account_with_roles,
    card,
    graph,
    install_crds,
    operator,
    reasons,
    wait_for,
)
from tests.testing.processes import eventually

WARM_UP_S = 5
DEADLINE_S = 10
OLD, NEW = "example.com/engine:1", "example.com/engine:2"
NOWHERE = {"example.com/there-is-none": "true"}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


def fleet(namespace: str, image: str, **pod: object) -> dict[str, Any]:
    """One prefill and one decode worker in each of three zones."""
    found = graph(namespace, "llm", domain="zone", labelKey=ZONE)
    found["spec"]["upgrade"] = {"by": "zone"}
    for component in found["spec"]["components"][1:]:
        component |= {"minReadySeconds": WARM_UP_S, "progressDeadlineSeconds": DEADLINE_S}
        component["podTemplate"]["spec"] |= pod
        component["podTemplate"]["spec"]["containers"][0]["image"] = image
    return found


def workers(plane: ControlPlane, namespace: str, image: str) -> Iterator[dict[str, Any]]:
    """The workers of this image that don't end."""
    for pod in plane.read("pods", "--namespace", namespace)["items"]:
        is_leaving = "deletionTimestamp" in pod["metadata"]
        if pod["spec"]["containers"][0]["image"] == image and not is_leaving:
            yield pod


def of_zone(plane: ControlPlane, namespace: str, zone: str) -> list[tuple[datetime, datetime, str]]:
    """When the new workers of a zone were created and became Ready, and what they are."""
    return [
        (
            datetime.fromisoformat(pod["metadata"]["creationTimestamp"]),
            *(
                datetime.fromisoformat(each["lastTransitionTime"])
                for each in pod["status"]["conditions"]
                if (each["type"], each["status"]) == ("Ready", "True")
            ),
            pod["metadata"]["labels"]["kvrouter.dev/component"],
        )
        for pod in workers(plane, namespace, NEW)
        if pod["metadata"]["labels"].get(ZONE) == zone
    ]


async def until_paused(plane: ControlPlane, namespace: str, reason: str) -> None:
    await asyncio.to_thread(wait_for, plane, namespace, "Upgrading=False")

    async def is_recorded() -> bool:
        return reason in reasons(plane, namespace)

    await eventually(is_recorded)


async def test_pairs_of_a_zone_are_upgraded_together_and_warm_before_the_next(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, OLD))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        plane.apply(fleet(namespace, NEW))
        await until_paused(plane, namespace, "NotAvailable")
        assert len([*workers(plane, namespace, OLD)]) == 4
        for number, role in enumerate(("prefill", "decode")):
            plane.apply(card(namespace, number, role, ZONES[0]))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        before: datetime | None = None
        for zone in ZONES:
            found = of_zone(plane, namespace, zone)
            assert {role for *_, role in found} == {"prefill", "decode"}
            if before is not None:
                began = min(created for created, *_ in found)
                assert (began - before).total_seconds() >= WARM_UP_S
            before = max(ready for _, ready, _ in found)
        status = plane.read("dgd", "llm", "--namespace", namespace)["status"]
        assert "Upgrading" not in {each["type"] for each in status["conditions"]}


async def test_new_workers_that_fail_pause_the_upgrade_until_the_spec_changes(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with operator(plane, namespace, "one", kubeconfig=account):
        plane.apply(fleet(namespace, OLD))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        kept = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        plane.apply(fleet(namespace, NEW, nodeSelector=NOWHERE))
        await until_paused(plane, namespace, "NewWorkersFail")
        there = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        assert len(there & kept) == 4
        plane.apply(fleet(namespace, OLD))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        assert {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)} > there
