"""The operator's policy for bindings, in force: pods know their place in the event that tells their node."""

from itertools import count
from typing import Any

from kubernetes.aio.client import ApiClient

from kvrouter.operator.labels import Copy, PolicyScope, binding_policy
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import RACK
from tests.cluster.pods import bound, pod
from tests.support.processes import eventually

ZONE_COPY = Copy("zone", "topology.kubernetes.io/zone", "grove.io/topology.zone")
RACK_COPY = Copy("rack", RACK, "grove.io/topology.rack")
NOWHERE = Copy("block", "example.com/block", "grove.io/topology.block")
COPIES = (ZONE_COPY, RACK_COPY, NOWHERE)
FORGED = {copy.pod_label: "forged" for copy in COPIES}


async def test_every_level_reaches_workers_over_what_users_wrote_and_no_other_pod(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    name = f"kvrouter-{namespace}"
    plane.apply(*binding_policy(name, COPIES, PolicyScope((namespace,), ("llm-prefill",))))
    numbers = count()
    seen: dict[str, Any] = {}

    async def is_in_force() -> bool:
        seen.update(await bound(plane, api, pod(namespace, f"llm-prefill-{next(numbers)}", FORGED)))
        return bool(seen["metadata"]["labels"][ZONE_COPY.pod_label] != "forged")

    await eventually(is_in_force)
    of_node = plane.read("node", seen["spec"]["nodeName"])["metadata"]["labels"]
    of_pod = seen["metadata"]["labels"]
    assert {copy.pod_label: of_pod[copy.pod_label] for copy in COPIES} == {
        ZONE_COPY.pod_label: of_node[ZONE_COPY.node_label],
        RACK_COPY.pod_label: of_node[RACK_COPY.node_label],
        NOWHERE.pod_label: "",
    }
    bare = await bound(plane, api, pod(namespace, "llm-prefill-bare"))
    assert bare["metadata"]["labels"].keys() >= FORGED.keys()
    other = await bound(plane, api, pod(namespace, "other", FORGED))
    assert {key: other["metadata"]["labels"][key] for key in FORGED} == FORGED
    plane.kubectl("delete", "mutatingadmissionpolicy,mutatingadmissionpolicybinding", name)
