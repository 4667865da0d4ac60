"""What the operator can not rest on where Kubernetes is older than 1.35."""

import json
from collections.abc import Collection
from typing import Any

from tests.system.cluster.control_plane import ControlPlane, Features
from tests.system.cluster.kubelet import Kubelet
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, ZONE
from tests.system.cluster.operators import graph, install_crds, operator
from tests.system.cluster.pods import BY_HAND, bound_by_hand
from tests.system.cluster.webhooks import (
    SERVICE,
    name_of,
    on_bindings,
    on_deployments,
    own_certificate,
    until_serving,
)
from tests.testing.processes import eventually, free_ports
from tests.testing.waits import until


def test_an_older_cluster_has_neither_label_feature(older_plane: ControlPlane) -> None:
    off = Features(mutating_admission_policy=False, copies_binding_labels=False)
    assert older_plane.features() == off


def test_a_bindings_annotations_reach_its_pod_but_not_its_labels(older_plane: ControlPlane) -> None:
    with new_namespace(older_plane) as namespace:
        metadata = bound_by_hand(older_plane, namespace)["metadata"]
    assert metadata["annotations"][RACK] == "said"
    assert not {RACK, ZONE} & metadata["labels"].keys()


async def test_topology_wait_waits_for_labels_that_come_after_binding(older_plane: ControlPlane) -> None:
    """Though a webhook is there that nobody needs in such a cluster, and somebody forged a label."""
    install_crds(older_plane)
    with new_namespace(older_plane) as namespace:
        older_plane.lead_service(namespace, SERVICE)
        name, port = name_of(namespace), free_ports(1)
        flags = own_certificate(namespace, port)
        with (
            older_plane.deleting("validatingwebhookconfiguration", name),
            older_plane.deleting("mutatingwebhookconfiguration", f"{name}-binding"),
        ):
            older_plane.apply(on_deployments(namespace, port), on_bindings(namespace, port))
            async with Kubelet(older_plane, namespace) as kubelet:
                async with operator(older_plane, namespace, "one", *flags) as one:
                    await until_serving(one)
                    older_plane.apply(gated(graph(namespace, "llm", labelKey=RACK, domain="rack")))
                    waiting = await gated_pods(older_plane, namespace)
                for each in waiting:
                    ungate(older_plane, namespace, each)
                await until(lambda: all("waiting" in log for log in init_logs(kubelet, waiting)))
                assert not any(pod.containers[0].starts for pod in kubelet.pods.values())
                assert not any(RACK in kubelet.first_seen[each]["metadata"]["labels"] for each in waiting)
                async with operator(older_plane, namespace, "two", *flags):
                    await until(lambda: all(pod.is_ready for pod in kubelet.pods.values()))
                for pod in kubelet.pods.values():
                    labels = older_plane.read("node", pod.stored["spec"]["nodeName"])["metadata"]["labels"]
                    engine = pod.containers[0]
                    await until(lambda: bool(engine.log))  # noqa: B023 - it is Ready once it was started
                    assert engine.log == labels[RACK]


def gated(manifest: dict[str, Any]) -> dict[str, Any]:
    """Workers whose pods are bound when a test says so, and that write what they hear of their place."""
    tells = "printf %s $(cat /etc/dynamo/topology/rack); while :; do sleep 0.1; done"
    engine = {"name": "main", "image": "example.com/engine:1", "command": ["/bin/sh", "-c", tells]}
    for component in manifest["spec"]["components"][1:]:
        spec = {"containers": [engine], "schedulingGates": [{"name": "kvrouter.test/gate"}]}
        labels = {**BY_HAND, RACK: "forged"}
        component |= {"replicas": 1, "podTemplate": {"metadata": {"labels": labels}, "spec": spec}}
    return manifest


async def gated_pods(plane: ControlPlane, namespace: str) -> list[str]:
    """The names of both workers' pods, once they are there."""
    names: list[str] = []

    async def are_there() -> bool:
        found = plane.read("pods", "-l", "kvrouter.dev/component!=frontend", "--namespace", namespace)
        names[:] = [each["metadata"]["name"] for each in found["items"]]
        return len(names) == 2

    await eventually(are_there)
    return names


def ungate(plane: ControlPlane, namespace: str, name: str) -> None:
    patch = [{"op": "remove", "path": "/spec/schedulingGates"}]
    plane.kubectl("patch", "pod", name, "-n", namespace, "--type=json", "--patch", json.dumps(patch))


def init_logs(kubelet: Kubelet, names: Collection[str]) -> list[str]:
    """What the pods' init commands wrote, empty for one that is not played yet."""
    logs = {pod.stored["metadata"]["name"]: pod.init_containers[0].log for pod in kubelet.pods.values()}
    return [logs.get(name, "") for name in names]
