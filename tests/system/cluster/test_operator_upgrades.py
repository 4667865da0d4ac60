"""A change of workers' templates passes zone by zone through a fleet with ``spec.upgrade``."""

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from aiohttp import web

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE, ZONES
from tests.system.cluster.operators import (
    account_with_roles,
    card,
    graph,
    install_crds,
    operator,
    until_recorded,
    wait_for,
)
from tests.testing.metrics_page import empty, metrics_page
from tests.testing.processes import eventually

WARM_UP_S = 5
DEADLINE_S = 10
OLD, NEW = "example.com/engine:1", "example.com/engine:2"
NOWHERE = {"example.com/there-is-none": "true"}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


def fleet(namespace: str, image: str, port: int = 9, **pod: object) -> dict[str, Any]:
    """One prefill and one decode worker in each of three zones, and a frontend with its metrics at a port."""
    found = graph(namespace, "llm", domain="zone", labelKey=ZONE)
    found["spec"]["upgrade"] = {"by": "zone"}
    listens = {"name": "main", "env": [{"name": "DYN_HTTP_PORT", "value": str(port)}]}
    found["spec"]["components"][0]["podTemplate"] = {"spec": {"containers": [listens]}}
    for component in found["spec"]["components"][1:]:
        component["minReadySeconds"] = WARM_UP_S
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


def give_metrics(plane: ControlPlane, namespace: str) -> None:
    """Let the frontend's pod have the address of a page of metrics."""
    frontend = ("--namespace", namespace, "--selector", "kvrouter.dev/component=frontend")
    (pod,) = plane.read("pods", *frontend)["items"]
    address = {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    patch = ("--subresource=status", "--type=merge", "--patch", json.dumps(address))
    plane.kubectl("patch", "pod", pod["metadata"]["name"], "--namespace", namespace, *patch)


def assert_one_zone_after_another(plane: ControlPlane, namespace: str, roles: set[str]) -> None:
    before: datetime | None = None
    for zone in ZONES:
        found = of_zone(plane, namespace, zone)
        assert {role for *_, role in found} == roles
        if before is not None:
            began = min(created for created, *_ in found)
            assert (began - before).total_seconds() >= WARM_UP_S
        before = max(ready for _, ready, _ in found)


async def until_paused(plane: ControlPlane, namespace: str, reason: str) -> None:
    await asyncio.to_thread(wait_for, plane, namespace, "Upgrading=False")
    await until_recorded(plane, namespace, reason)


async def test_pairs_of_a_zone_are_upgraded_together_and_warm_before_the_next(
    plane: ControlPlane, namespace: str
) -> None:
    may_be_read = asyncio.Event()
    may_be_read.set()

    async def page(request: web.Request) -> web.Response:
        await may_be_read.wait()
        return await empty(request)

    async with metrics_page(page) as port:
        async with operator(plane, namespace, "one"):
            plane.apply(fleet(namespace, OLD, port))
            await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
            give_metrics(plane, namespace)
            plane.apply(fleet(namespace, NEW, port))
            await until_paused(plane, namespace, "NotAvailable")
            assert len([*workers(plane, namespace, OLD)]) == 4
        for number, role in enumerate(("prefill", "decode")):
            plane.apply(card(namespace, number, role, ZONES[0]))
        may_be_read.clear()
        async with operator(plane, namespace, "two"):
            await asyncio.to_thread(wait_for, plane, namespace, "Upgrading=Unknown")
            assert len([*workers(plane, namespace, OLD)]) == 4
            may_be_read.set()
            await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
            assert_one_zone_after_another(plane, namespace, {"prefill", "decode"})
            status = plane.read("dgd", "llm", "--namespace", namespace)["status"]
            assert "Upgrading" not in {each["type"] for each in status["conditions"]}


def two_at_a_time(namespace: str, image: str, port: int, by: str = "zone") -> dict[str, Any]:
    """Two decode workers of this image in each zone, replaced two at a time; prefill keeps the old one."""
    found = fleet(namespace, OLD, port)
    found["spec"]["upgrade"] = {"by": by}
    decode = found["spec"]["components"][2]
    decode |= {"replicas": 6, "strategy": {"rollingUpdate": {"maxUnavailable": 2}}}
    decode["podTemplate"]["spec"]["containers"][0]["image"] = image
    return found


async def test_a_batch_short_of_quota_takes_no_other_worker_and_pauses_with_the_spec(
    plane: ControlPlane, namespace: str
) -> None:
    few = {"namespace": namespace, "name": "few"}
    async with metrics_page() as port, operator(plane, namespace, "one"):
        for number, role in enumerate(("prefill", "decode")):
            plane.apply(card(namespace, number, role, ZONES[0]))
        plane.apply(two_at_a_time(namespace, OLD, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        give_metrics(plane, namespace)
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": few,
            "spec": {"hard": {"pods": "9"}},
        }
        plane.apply(quota)
        plane.apply(two_at_a_time(namespace, NEW, port))

        async def is_half_warm() -> bool:
            # A quota counts from a cache: it may let the whole of a first batch pass, and stop the next.
            decode = plane.read("deployment", "llm-decode", "--namespace", namespace)["status"]
            return bool(decode.get("updatedReplicas", 0) % 2 == 1 and decode.get("availableReplicas") == 5)

        await eventually(is_half_warm)
        await until_recorded(plane, namespace, "PodsRefused")
        plane.apply(two_at_a_time(namespace, NEW, port, by="row"))
        await until_paused(plane, namespace, "SpecInvalid")
        paused = plane.read("deployment", "llm-decode", "--namespace", namespace)["spec"]
        assert paused["paused"]
        plane.kubectl("delete", "resourcequota", "few", "--namespace", namespace)
        plane.apply(two_at_a_time(namespace, NEW, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        assert_one_zone_after_another(plane, namespace, {"decode"})


async def test_new_workers_that_fail_pause_the_upgrade_until_the_spec_changes(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(plane, namespace, "kvrouter-operator")
    async with metrics_page() as port, operator(plane, namespace, "one", kubeconfig=account):
        plane.apply(fleet(namespace, OLD, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        give_metrics(plane, namespace)
        kept = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        failing = fleet(namespace, NEW, port, nodeSelector=NOWHERE)
        for component in failing["spec"]["components"][1:]:
            component["progressDeadlineSeconds"] = DEADLINE_S
        plane.apply(failing)
        await until_paused(plane, namespace, "NewWorkersFail")
        there = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        assert len(there & kept) == 4
        plane.apply(fleet(namespace, OLD, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        assert {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)} > there


async def test_a_new_pair_that_cannot_talk_pauses_the_upgrade_until_the_spec_changes(
    plane: ControlPlane, namespace: str
) -> None:
    """Nobody reads circuits before the cards are there, so no second zone begins without them."""
    async with metrics_page() as port, operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, OLD, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        kept = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        plane.apply(fleet(namespace, NEW, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Upgrading=Unknown")
        pair = await new_pair(plane, namespace)
        for number, (role, version) in enumerate((("prefill", "2"), ("decode", "3"))):
            plane.apply(card(namespace, number, role, ZONES[0], pod=pair[role], version=version))
        for number, role in enumerate(("prefill", "decode"), start=2):
            plane.apply(card(namespace, number, role, ZONES[1]))
        await asyncio.to_thread(wait_for, plane, namespace, "Available=True")
        give_metrics(plane, namespace)
        await until_paused(plane, namespace, "NewWorkersWithoutPair")
        there = {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)}
        assert len(there) == 4
        assert there < kept
        plane.apply(fleet(namespace, OLD, port))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready=True")
        assert {pod["metadata"]["uid"] for pod in workers(plane, namespace, OLD)} > there


async def new_pair(plane: ControlPlane, namespace: str) -> dict[str, dict[str, Any]]:
    """Return the new workers by their role, once both are there."""
    found: dict[str, dict[str, Any]] = {}

    async def are_there() -> bool:
        new = workers(plane, namespace, NEW)
        found.update({pod["metadata"]["labels"]["kvrouter.dev/component"]: pod for pod in new})
        return len(found) == 2

    await eventually(are_there)
    return found
