"""Pods for tests: their manifests, and what a watch tells of their binding."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kubernetes.aio.client import ApiClient

from kvrouter.kube.client import KubeClient, manifest_of
from kvrouter.kube.kubeconfig import LoaderConnection
from kvrouter.kube.objects import key_of
from kvrouter.operator.cluster_info import PODS
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK, ZONES

BY_HAND = {"kvrouter.test/kubelet": "by-hand"}
"""Labels of a pod that KWOK leaves alone: whoever wants it to run, and to go, writes so itself."""

BOUND_WITHIN_S = 120
HASH = "5d9c8f7b6"
DRAWN = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes of a template's hash, and the characters that it draws the ends of names from."""


def pod(namespace: str, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The manifest of a pod."""
    metadata = {"namespace": namespace, "name": name, "labels": dict(labels or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec()}


def worker_name(workload: str, number: int) -> str:
    """A name as the pods of this Deployment have it, another one for each number."""
    end = [DRAWN[number // len(DRAWN) ** place % len(DRAWN)] for place in range(5)]
    return f"{workload}-{HASH}-{''.join(end)}"


def pod_spec() -> dict[str, Any]:
    """One container."""
    return {"containers": [{"name": "main", "image": "example.com/nothing:1"}]}


async def bound(plane: ControlPlane, api: ApiClient, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Create this pod; answers with what the first event of a watch shows that tells its node."""
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    before = plane.read("pods", "--namespace", namespace)["metadata"]["resourceVersion"]
    plane.apply(manifest)
    watch = KubeClient(LoaderConnection(api)).watch(PODS.path(namespace), before, for_s=BOUND_WITHIN_S)
    async with asyncio.timeout(BOUND_WITHIN_S), watch as stream:
        async for events in stream:
            for event in events:
                seen: dict[str, Any] = manifest_of(PODS, event.object)
                if key_of(seen) == (namespace, name) and seen.get("spec"):
                    return seen
    raise ConnectionError("the watch ended before the pod was bound")


def bound_by_hand(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """A pod that no scheduler sees, once it is bound with the label and the annotation ``RACK: said``."""
    manifest = pod(namespace, "bound-by-hand", BY_HAND)
    manifest["spec"]["schedulerName"] = "nobody"
    plane.apply(manifest)
    said = {RACK: "said"}
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "bound-by-hand", "labels": said, "annotations": said},
        "target": {"apiVersion": "v1", "kind": "Node", "name": f"{ZONES[0]}-0"},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/bound-by-hand"
    plane.kubectl("create", "--raw", f"{path}/binding", "--filename", "-", stdin=json.dumps(binding))
    seen = plane.read("pod", "bound-by-hand", "--namespace", namespace)
    plane.kubectl("delete", "--raw", f"{path}?gracePeriodSeconds=0")
    return seen
