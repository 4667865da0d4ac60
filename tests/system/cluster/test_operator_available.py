"""Available: whether requests are served, by the workers that are registered."""

import json

import openai
import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.missions import NAME, Mission, deployment, mission
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import ZONE, ZONES
from tests.system.cluster.operators import (
    WAIT,
    account_with_roles,
    card,
    graph,
    install_crds,
    operator,
)
from tests.testing.processes import eventually

LEASE_S = 3.0


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_the_available_condition_matches_served_requests(plane: ControlPlane) -> None:
    with new_namespace(plane) as namespace:
        account = account_with_roles(plane, namespace, "kvrouter-operator")
        manifest = deployment(namespace, {})
        main = manifest["spec"]["components"][2]["podTemplate"]["spec"]["containers"][0]
        main["args"][3] = "$(ROLE)"  # written out, it would be refused
        main["env"] = [*main.get("env", []), {"name": "ROLE", "value": "prefill"}]
        async with (
            operator(plane, namespace, "one", kubeconfig=account) as replica,
            mission(plane, manifest) as flight,
        ):
            await flight.kubectl("wait", "--for=condition=Ready", f"dgd/{NAME}", WAIT)
            await until(flight, "False", "ScaledToZero")
            await flight.scale(prefill=1)
            await until(flight, "False", "NoDecodeWorkers")
            await flight.scale(decode=1)
            await until_event(flight, "RoleMismatch", "component decode is of type decode, and its workers")
            await flight.until_is("Ready=True")
            assert "register as prefill" in (await flight.condition("Available"))["message"]
            await until_event(flight, "NoDecodeWorkers", "2 prefill workers are registered")
            with pytest.raises(openai.InternalServerError):
                await flight.ask()

            patch = [
                {
                    "op": "replace",
                    "path": "/spec/components/2/podTemplate/spec/containers/0/args/3",
                    "value": "decode",
                }
            ]
            await flight.kubectl("patch", "dgd", NAME, "--type=json", "--patch", json.dumps(patch))
            await until(flight, "True", "RequestsServed")
            await flight.until_is("Ready=True")
            row = (await flight.kubectl("get", "dgd", NAME, "--no-headers")).split()
            assert row[:3] == [NAME, "True", "True"]
            await until_links(flight)
            await flight.scale(decode=0)
            await until(flight, "False", "NoDecodeWorkers")
            assert "forbidden" not in replica.log


async def test_the_available_condition_follows_cards_leases_and_domains(
    plane: ControlPlane, namespace: str
) -> None:
    spec = graph(namespace, "llm", labelKey=ZONE, domain="zone")
    for component in spec["spec"]["components"][1:]:
        component["replicas"] = 1
    async with operator(plane, namespace, "one"):
        plane.apply(spec)
        await becomes(plane, namespace, "False", "NoWorkers")
        plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
        one, other = ZONES[:2]
        plane.apply(card(namespace, 1, "prefill", one))
        await becomes(plane, namespace, "False", "NoDecodeWorkers")
        plane.apply(card(namespace, 2, "decode", other))
        await becomes(plane, namespace, "False", "NoPairInDomain")
        plane.apply(card(namespace, 3, "decode", one))
        await becomes(plane, namespace, "True", "RequestsServed")
        plane.apply(card(namespace, 3, "decode", one, draining=True))
        await becomes(plane, namespace, "False", "NoPairInDomain")
        plane.apply(card(namespace, 3, "decode", one))
        await becomes(plane, namespace, "True", "RequestsServed")
        plane.apply(card(namespace, 3, "decode", one, lease_s=LEASE_S))
        await becomes(plane, namespace, "False", "NoPairInDomain")
        spec["spec"]["components"][0]["replicas"] = 0
        plane.apply(spec)
        await becomes(plane, namespace, "False", "ScaledToZero")


async def test_the_available_condition_is_unknown_with_nats_unless_certain(
    plane: ControlPlane, namespace: str
) -> None:
    nats = ("--discovery", "nats", "--nats-server", "nats://127.0.0.1:1")
    async with operator(plane, namespace, "one", *nats):
        spec = graph(namespace, "llm")
        plane.apply(spec)
        await becomes(plane, namespace, "Unknown", "WorkersUnknown")
        spec["spec"]["components"][2]["replicas"] = 0
        plane.apply(spec)
        await becomes(plane, namespace, "False", "NoDecodeWorkers")


async def becomes(plane: ControlPlane, namespace: str, status: str, reason: str) -> None:
    """Return once the deployment's condition says so."""

    async def is_so() -> bool:
        found = plane.read("dgd", "llm", "--namespace", namespace).get("status", {}).get("conditions", [])
        return (status, reason) in [
            (each["status"], each["reason"]) for each in found if each["type"] == "Available"
        ]

    await eventually(is_so)


async def until(flight: Mission, status: str, reason: str) -> None:
    async def is_so() -> bool:
        reported = await flight.condition("Available")
        return (reported["status"], reported["reason"]) == (status, reason)

    await eventually(is_so)


async def until_links(flight: Mission) -> None:
    """Ask until the status has the links that the frontend learned of."""

    async def are_shown() -> bool:
        await flight.ask_often(2)
        links = (await flight.read("dgd", NAME))["status"].get("links", [])
        learned = (await flight.metrics()).of("link_bandwidth_bytes_per_second")
        shown = [{"model": each["model"], "link": each["link"]} for each in links]
        return bool(shown) and shown == [labels for labels, _ in learned]

    await eventually(are_shown)


async def until_event(flight: Mission, reason: str, words: str) -> None:
    async def is_reported() -> bool:
        events = (await flight.read("events"))["items"]
        return any(event["reason"] == reason and words in event["message"] for event in events)

    await eventually(is_reported)
