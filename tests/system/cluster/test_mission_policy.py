"""A policy changes while requests go on: what must roll does, nothing else, and nobody notices."""

import json

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.missions import (
    COMPONENTS,
    NAME,
    USED,
    WORKERS,
    Mission,
    deployment,
    mission,
    nodes_of,
    zones,
)
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import ZONE
from tests.system.cluster.operators import WAIT, install_crds, operator
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually


async def test_policy_changes_under_load_roll_only_the_affected_components(
    own_plane: ControlPlane, shared_nats: NatsServer
) -> None:
    install_crds(own_plane)
    over_nats = ("--discovery", "nats", "--nats-server", shared_nats.url)
    policy = {"labelKey": ZONE, "domain": "zone"}
    with new_namespace(own_plane) as namespace:
        async with (
            operator(own_plane, namespace, "one", *over_nats),
            mission(own_plane, deployment(namespace, policy)) as flight,
        ):
            await flight.scale(**WORKERS)
            await flight.until_whole()
            assert set(zones(await flight.ask_until_used(*USED))) == {(zone, zone) for zone in USED}
            rolls = {"frontend", "prefill"}
            await policy_changes_under_requests(flight, rolls, enforcement="fallback")
            await kv_falls_back_where_no_decoders_are(flight)
            await policy_changes_under_requests(flight, rolls, enforcement="preferred", preferredWeight=0.5)
            await policy_changes_under_requests(flight, {"prefill"}, preferredWeight=0.75)


async def policy_changes_under_requests(flight: Mission, rolls: set[str], **change: object) -> None:
    before = {name: {each.uid for each in flight.pods(name)} for name in COMPONENTS}
    patch = json.dumps({"spec": {"experimental": {"kvTransferPolicy": change}}})
    async with flight.under_load() as load:
        generation = (await flight.read("dgd", NAME))["metadata"]["generation"]
        await flight.kubectl("patch", "dgd", NAME, "--type=merge", "--patch", patch)
        observed = f"jsonpath={{.status.observedGeneration}}={generation + 1}"
        await flight.kubectl("wait", f"--for={observed}", f"dgd/{NAME}", WAIT)
        for name in rolls:
            await flight.kubectl("rollout", "status", f"deployment/{NAME}-{name}", WAIT)
        await flight.until_whole()
        await eventually(lambda: have_gone(flight, set[str]().union(*(before[name] for name in rolls))))
    assert not load.failures
    assert load.answers
    assert all(answer.prefill_domain for answer in load.answers), "no prefill worker was left meanwhile"
    after = {name: {each.uid for each in flight.pods(name)} for name in COMPONENTS}
    assert {name for name in COMPONENTS if not after[name] & before[name]} == rolls
    assert {name for name in COMPONENTS if after[name] != before[name]} == rolls
    stated = (await flight.read("dgd", NAME))["spec"]["experimental"]["kvTransferPolicy"]
    published = [worker["kv_transfer"] for worker in await flight.fleet() if worker["role"] == "prefill"]
    for policy in published:
        assert policy["enforcement"] == stated["enforcement"]
        assert policy.get("weight") == stated.get("preferredWeight")


async def have_gone(flight: Mission, uids: set[str]) -> bool:
    """Whether somebody deletes each of these pods, if it is still there."""
    return not uids & {each.uid for each in flight.pods()}


async def kv_falls_back_where_no_decoders_are(flight: Mission) -> None:
    """A prefill worker with decode workers in its zone is taken first: KV crosses when there is none."""
    one, other = USED
    await flight.lose("decode", one)
    await flight.until_is("DomainBalanced=False")
    assert set(zones(await flight.ask_often(8))) == {(other, other)}
    assert (await flight.metrics()).total("fallbacks_total") == 0
    await flight.lose("prefill", other)
    assert set(zones(await flight.ask_often(8))) == {(one, other)}
    assert (await flight.metrics()).total("fallbacks_total", domain="zone") >= 8
    await flight.kubectl("uncordon", *nodes_of(one), *nodes_of(other))
    await flight.until_whole()
