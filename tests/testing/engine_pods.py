"""Pods that hold engines, as the API server writes them."""

import json
from collections.abc import Mapping
from typing import Any

from kvrouter.core.workers import EnginePod
from kvrouter.transports.records.kubernetes.pods import pod_of

ENGINE = "kvrouter.dev/engine"
ZONE = "topology.kubernetes.io/zone"


def pod_json(
    name: str = "vllm-0",
    *,
    ip: str = "10.0.0.7",
    ports: Mapping[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ready: bool = True,
    restarts: int = 0,
    more: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """A pod with one container. ``annotations`` are without their prefix; ``more`` is of its metadata."""
    listed = [{"name": port, "containerPort": number} for port, number in (ports or {"http": 8000}).items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": f"uid of {name}",
            "resourceVersion": "7",
            "labels": {ENGINE: "vllm", **(labels or {})},
            "annotations": {f"kvrouter.dev/{key}": value for key, value in (annotations or {}).items()},
            **(more or {}),
        },
        "spec": {"containers": [{"name": "engine", "ports": listed}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "engine", "restartCount": restarts, "containerID": "c"}],
        },
    }


def pod(name: str = "vllm-0", **said: Any) -> EnginePod:
    """What is read of :func:`pod_json`."""
    return pod_of(json.dumps(pod_json(name, **said)).encode())
