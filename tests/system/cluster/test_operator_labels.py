"""The operator's policy for bindings, in force: pods know their place in the event that tells their node."""

from itertools import count
from typing import Any

from kubernetes.aio.client import ApiClient

from kvrouter.operator.labels.binding import binding_policy
from kvrouter.operator.labels.level_labels import LevelLabels, node_places
from kvrouter.operator.labels.pods import Node
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK, ZONES
from tests.system.cluster.operators import install_crds
from tests.system.cluster.pods import bound, pod, worker_name
from tests.testing.processes import eventually

ZONE_COPY = LevelLabels("zone", "topology.kubernetes.io/zone", "grove.io/topology.zone")
RACK_COPY = LevelLabels("rack", RACK, "grove.io/topology.rack")
NOWHERE = LevelLabels("block", "example.com/block", "grove.io/topology.block")
COPIES = (ZONE_COPY, RACK_COPY, NOWHERE)
KINDS = "mutatingadmissionpolicybinding,mutatingadmissionpolicy,kvrouternodeplaces"
STRANGERS = (
    "stranger-0",
    worker_name("other", 1),  # elsewhere it were a worker
    "llm-prefill-0",
    "llm-prefill-migrate-x7k2p",
    worker_name("llm-prefill-b", 1),
    f"{worker_name('llm-prefill', 20_000)}-0",
)
FORGED = {copy.pod_label: "forged" for copy in COPIES}


async def test_place_labels_overwrite_user_values_on_workers_only(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    name = f"kvrouter-{namespace}"
    install_crds(plane)
    nodes = [
        Node(node["metadata"]["name"], node["metadata"]["labels"]) for node in plane.read("nodes")["items"]
    ]
    workloads = {namespace: ["llm-prefill"], "elsewhere": ["other"]}
    plane.apply(node_places(name, COPIES, nodes, workloads), *binding_policy(name, COPIES, workloads))
    numbers = count()
    seen: dict[str, Any] = {}

    async def is_in_force() -> bool:
        seen.update(
            await bound(plane, api, pod(namespace, worker_name("llm-prefill", next(numbers)), FORGED))
        )
        return bool(seen["metadata"]["labels"][ZONE_COPY.pod_label] != "forged")

    await eventually(is_in_force)
    of_node = plane.read("node", seen["spec"]["nodeName"])["metadata"]["labels"]
    of_pod = seen["metadata"]["labels"]
    assert {copy.pod_label: of_pod[copy.pod_label] for copy in COPIES} == {
        ZONE_COPY.pod_label: of_node[ZONE_COPY.node_label],
        RACK_COPY.pod_label: of_node[RACK_COPY.node_label],
        NOWHERE.pod_label: "",
    }
    bare = await bound(plane, api, pod(namespace, worker_name("llm-prefill", 10_000)))
    assert bare["metadata"]["labels"].keys() >= FORGED.keys()
    for stranger in STRANGERS:
        seen = await bound(plane, api, pod(namespace, stranger, FORGED))
        assert {key: seen["metadata"]["labels"][key] for key in FORGED} == FORGED
    plane.kubectl("delete", KINDS, name)


async def test_a_pod_on_a_node_unknown_to_the_policy_is_bound_unchanged(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    name = f"kvrouter-{namespace}"
    install_crds(plane)
    known, unknown = Node(f"{ZONES[0]}-0", {ZONE_COPY.node_label: ZONES[0]}), f"{ZONES[1]}-0"
    workloads = {namespace: ["llm-prefill"]}
    plane.apply(node_places(name, (ZONE_COPY,), [known], workloads))
    plane.apply(*binding_policy(name, (ZONE_COPY,), workloads))
    numbers = count()

    async def reported(node: str) -> str:
        manifest = pod(namespace, worker_name("llm-prefill", next(numbers)), FORGED)
        manifest["spec"]["nodeSelector"] = {RACK: f"{node[:-2]}-rack-{node[-1]}"}
        seen = await bound(plane, api, manifest)
        assert seen["spec"]["nodeName"] == node
        return str(seen["metadata"]["labels"][ZONE_COPY.pod_label])

    async def is_in_force() -> bool:
        return await reported(known.name) == ZONES[0]

    await eventually(is_in_force)
    assert await reported(unknown) == "forged", "the operator repairs this one"
    plane.kubectl("delete", KINDS, name)
