"""The whole mission: one deployment spans zones, and no KV leaves its zone, whatever happens to them."""

import asyncio
from typing import Any

import openai
import pytest
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import new_client_from_config

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.grove import install_grove, topology
from tests.system.cluster.missions import (
    DECODES,
    NAME,
    PREFILLS,
    USED,
    WHOLE,
    WORKERS,
    Mission,
    deployment,
    mission,
    node_zone,
    nodes_of,
    zones,
)
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, ZONE
from tests.system.cluster.operators import account_with_roles, install_crds, operator
from tests.system.cluster.pods import bound, pod, worker_name
from tests.testing.processes import eventually
from tests.testing.waits import until

LEVELS = {"zone": ZONE, "rack": RACK}
PLACE = "grove.io/topology.zone"
FABRIC = {"clusterTopologyName": "fabric", "domain": "zone"}


async def test_no_kv_crosses_zones_through_all_failures_and_recoveries(own_plane: ControlPlane) -> None:
    install_crds(own_plane)
    install_grove(own_plane)
    own_plane.apply(topology("fabric", LEVELS))
    with new_namespace(own_plane) as namespace:
        account = account_with_roles(own_plane, namespace, "kvrouter-operator")
        async with (
            operator(own_plane, namespace, "one", kubeconfig=account),
            mission(own_plane, deployment(namespace, FABRIC)) as flight,
        ):
            await labels_come_at_binding(flight)
            await engines_wait_for_their_files(flight)
            await admin_routes_are_for_who_knows_the_token(flight)
            await requests_stay_in_their_zone(flight)
            await zones_lose_their_decoders_and_get_them_back(flight)
            await the_api_server_dies_and_comes_back(flight)
            await a_zone_is_renamed_under_running_workers(flight)


async def labels_come_at_binding(flight: Mission) -> None:
    """The API server takes a moment to have a new policy in force; workers are asked for only then."""
    api: ApiClient = await new_client_from_config(str(flight.plane.admin))
    async with api:
        numbers = iter(range(1_000))

        async def is_in_force() -> bool:
            stray = pod(flight.namespace, worker_name(f"{NAME}-decode", next(numbers)))
            seen = await bound(flight.plane, api, stray)
            return PLACE in seen["metadata"].get("labels", {})

        await eventually(is_in_force)
    await flight.kubectl("delete", "pods", "--selector", "!kvrouter.dev/component")


async def engines_wait_for_their_files(flight: Mission) -> None:
    flight.kubelet.hold_files()
    await flight.scale(**WORKERS)

    async def all_wait() -> bool:
        waits = [worker.init_containers[0] for worker in flight.pods("prefill", "decode")]
        return len(waits) == WHOLE.total() and all("waiting for" in wait.log for wait in waits)

    await eventually(all_wait)
    workers = flight.pods("prefill", "decode")
    assert all(worker.init_containers[0].is_running for worker in workers)
    assert not any(container.starts for worker in workers for container in worker.containers)
    for worker in workers:
        first = flight.kubelet.first_seen[worker.name]
        assert first["metadata"]["labels"][PLACE] == node_zone(worker)
    flight.kubelet.release_files()
    await flight.until_whole()
    await flight.until_is("Available=True")
    cards = (await flight.read("kvw"))["items"]
    owners = [owner["name"] for card in cards for owner in card["metadata"]["ownerReferences"]]
    assert sorted(owners) == sorted(worker.name for worker in workers)
    for reported in await flight.fleet():
        (worker,) = [each for each in workers if each.address in reported["address"]]
        assert reported["domains"]["zone"] == node_zone(worker)
        assert set(reported["domains"]) == set(LEVELS)
        assert [container.starts for container in (*worker.init_containers, *worker.containers)] == [1, 1]


async def admin_routes_are_for_who_knows_the_token(flight: Mission) -> None:
    busy = {"model": "mock", "active_decode_blocks_threshold": 0.0}
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer another"}):
        assert (await flight.http.get("/v1/fleet", headers=headers)).status_code == 401
        assert (await flight.http.post("/busy_threshold", json=busy, headers=headers)).status_code == 401
    assert (await flight.http.get("/busy_threshold")).status_code == 200


async def requests_stay_in_their_zone(flight: Mission) -> None:
    answers = await flight.ask_until_used(*USED)
    assert set(zones(answers)) == {(zone, zone) for zone in USED}
    page = await flight.metrics()
    handoffs = {
        (reported["prefill_domain"], reported["decode_domain"]): n
        for reported, n in page.of("handoffs_total")
        if n
    }
    assert set(handoffs) == {(zone, zone) for zone in USED}
    assert sum(handoffs.values()) >= len(answers)
    for answer in answers:
        reported = await flight.http.get(f"/v1/decisions/{answer.request_id}")
        attempts = reported.raise_for_status().json()["attempts"]
        assert {(each["constraint"]["enforcement"], each["cross_domain"]) for each in attempts} == {
            ("required", False)
        }


async def zones_lose_their_decoders_and_get_them_back(flight: Mission) -> None:
    one, other = USED
    await flight.lose("decode", one)
    await flight.until_is("DomainBalanced=False")
    reported = await flight.condition("DomainBalanced")
    assert reported["reason"] == "DomainWithoutDecode"
    assert one in reported["message"]
    row = await flight.kubectl("get", "dgd", NAME, "--no-headers")
    assert f"{one} {PREFILLS}/0, {other} {PREFILLS}/{DECODES}" in row

    async def is_an_event() -> bool:  # it is written after the status
        events = (await flight.read("events"))["items"]
        return "DomainWithoutDecode" in {event["reason"] for event in events}

    await eventually(is_an_event)
    assert set(zones(await flight.ask_often(8))) == {(other, other)}

    await flight.lose("prefill", other)
    refused = await refusal(flight)
    assert (refused["role"], refused["domain"]) == ("decode", "zone")
    assert refused["refusals"] == {"domain_mismatch": DECODES}
    await flight.until_is("Available=False")
    reported = await flight.condition("Available")
    assert reported["reason"] == "NoPairInDomain"
    assert f"prefill workers are in {one}, and decode workers in {other}" in reported["message"]

    await flight.lose("decode", other)
    await probes_are_asked_again(flight)
    refused = await refusal(flight)
    assert refused["refusals"] == {"wrong_role": PREFILLS}

    async def one_zone_is_left() -> bool:
        return f"{one} {PREFILLS}/0 " in await flight.kubectl("get", "dgd", NAME, "--no-headers")

    await eventually(one_zone_is_left)

    await flight.kubectl("uncordon", *nodes_of(one), *nodes_of(other))
    await flight.until_whole()
    await flight.until_is("DomainBalanced=True")
    await flight.until_is("Available=True")
    assert set(zones(await flight.ask_until_used(*USED))) == {(zone, zone) for zone in USED}


async def the_api_server_dies_and_comes_back(flight: Mission) -> None:
    flight.plane.kill_api_server()

    async def is_noticed() -> bool:
        return (await flight.metrics()).total("discovery_up") == 0

    await eventually(is_noticed)
    assert set(zones(await flight.ask_until_used(*USED))) == {(zone, zone) for zone in USED}
    assert await flight.places() == WHOLE
    await asyncio.to_thread(flight.plane.bring_back_api_server)

    async def is_back() -> bool:
        return (await flight.metrics()).total("discovery_up") == 1

    await eventually(is_back)
    await flight.ask_often(6)
    assert await flight.places() == WHOLE


async def a_zone_is_renamed_under_running_workers(flight: Mission) -> None:
    old, new = USED[1], "zone-renamed"
    moved = [worker for worker in flight.pods("prefill", "decode") if node_zone(worker) == old]
    before = {container: container.starts for worker in moved for container in worker.containers}
    await flight.kubectl("label", "nodes", *nodes_of(old), "--overwrite", f"{ZONE}={new}")

    async def has_moved() -> bool:
        places = await flight.places()
        return places["prefill", new] == PREFILLS and places["decode", new] == DECODES

    await eventually(has_moved)
    for worker in moved:
        assert worker.labels[PLACE] == new
        assert (worker.volume("topology-labels") / "zone").read_text() == new
    used = USED[0], new
    assert set(zones(await flight.ask_until_used(*used))) == {(zone, zone) for zone in used}
    assert before == {container: container.starts for container in before}


async def refusal(flight: Mission) -> dict[str, Any]:
    """The error of a request that nobody may serve, as OpenAI's client has it."""
    with pytest.raises(openai.InternalServerError) as refused:
        await flight.ask()
    assert (refused.value.status_code, refused.value.code) == (503, "no_eligible_worker")
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert isinstance(refused.value.body, dict)
    return refused.value.body


async def probes_are_asked_again(flight: Mission) -> None:
    """Return once frontends would be out of the Service, if their probes minded what was before."""
    (frontend,) = flight.pods("frontend")
    (main,) = frontend.containers
    enough = main.probes["readinessProbe"] + 2 * main.spec["readinessProbe"]["failureThreshold"]
    await until(lambda: main.probes["readinessProbe"] >= enough)
