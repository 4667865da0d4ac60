"""Pods for tests: their manifests, and what a watch tells of their binding."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kubernetes.aio.client import ApiClient, CoreV1Api
from kubernetes.aio.watch import Watch

from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import RACK, ZONES

BY_HAND = {"kvrouter.test/kubelet": "by-hand"}
"""Labels of a pod that KWOK leaves alone: whoever wants it to run, and to go, writes so itself."""

BOUND_WITHIN_S = 120.0


def pod(namespace: str, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The manifest of a pod."""
    metadata = {"namespace": namespace, "name": name, "labels": dict(labels or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec()}


def pod_spec() -> dict[str, Any]:
    """One container."""
    return {"containers": [{"name": "main", "image": "example.com/nothing:1"}]}


async def bound(plane: ControlPlane, api: ApiClient, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Create this pod; answers with what the first event of a watch shows that tells its node."""
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    before = plane.read("pods", "--namespace", namespace)["metadata"]["resourceVersion"]
    plane.apply(manifest)
    async with asyncio.timeout(BOUND_WITHIN_S), Watch() as watch:
        async for event in watch.stream(
            CoreV1Api(api).list_namespaced_pod,
            namespace,
            field_selector=f"metadata.name={name}",
            resource_version=before,
        ):
            seen: dict[str, Any] = event["raw_object"]
            if "nodeName" in seen["spec"]:
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
