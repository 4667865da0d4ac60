"""Whose the number of a component's pods is: the component's where it states one, else an autoscaler's."""

import asyncio
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT, autoscaler, generations, graph, install_crds, operator
from tests.testing.processes import eventually

DECODE = "llm-decode"


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_an_autoscaler_scales_a_component_without_replicas(plane: ControlPlane, namespace: str) -> None:
    plane.apply(metrics_definition())
    async with operator(plane, namespace, "one") as one:
        plane.apply(fleet(namespace, None))
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        assert replicas(plane, namespace) == 1

        plane.apply(autoscaler(namespace, DECODE, 3, 5))
        await scaled(plane, namespace, 3)
        await wait(plane, namespace, desired(3), "dgd/llm")
        await wait(plane, namespace, "condition=Ready", "dgd/llm")

        before = generations(plane, namespace)
        plane.apply(fleet(namespace, None, frontends=2))
        await wait(plane, namespace, "jsonpath={.spec.replicas}=2", "deployment/llm-frontend")
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        assert generations(plane, namespace)[DECODE] == before[DECODE]

        plane.apply(*(measured(namespace, name, "300Mi") for name in pods(plane, namespace)))
        await scaled(plane, namespace, 5)
        await wait(plane, namespace, desired(5), "dgd/llm")
        assert await one.end() == 0
    async with operator(plane, namespace, "two"):  # one that starts applies everything again
        plane.apply(fleet(namespace, None, frontends=1))
        await wait(plane, namespace, "jsonpath={.spec.replicas}=1", "deployment/llm-frontend")
        assert replicas(plane, namespace) == 5
    events = plane.read("events", "--namespace", namespace)["items"]
    assert not [each for each in events if each["reason"] == "ReplicasSetBack"]


async def test_the_replicas_stay_when_the_component_no_longer_states_them(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, 3))
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        before = pods(plane, namespace)
        assert len(before) == 3

        plane.apply(fleet(namespace, None))
        generation = plane.read("dgd", "llm", "--namespace", namespace)["metadata"]["generation"]
        assert generation == 2
        await wait(plane, namespace, f"jsonpath={{.status.observedGeneration}}={generation}", "dgd/llm")
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        assert replicas(plane, namespace) == 3
        assert pods(plane, namespace) == before  # not one of them went in between

        plane.kubectl("scale", f"deployment/{DECODE}", "--replicas=4", "--namespace", namespace)
        await wait(plane, namespace, desired(4), "dgd/llm")
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        assert before < pods(plane, namespace)

        plane.apply(fleet(namespace, 2))
        await scaled(plane, namespace, 2)


async def test_scaling_a_component_with_stated_replicas_is_set_back(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(fleet(namespace, 3))
        await wait(plane, namespace, "condition=Ready", "dgd/llm")
        plane.kubectl("scale", f"deployment/{DECODE}", "--replicas=5", "--namespace", namespace)

        async def is_reported() -> bool:
            events = plane.read("events", "--namespace", namespace)["items"]
            found = [each["message"] for each in events if each["reason"] == "ReplicasSetBack"]
            return any(f"Deployment {DECODE}" in each and "leave replicas out" in each for each in found)

        await eventually(is_reported)
        await scaled(plane, namespace, 3)


def fleet(namespace: str, decode: int | None, *, frontends: int = 1) -> dict[str, Any]:
    """A deployment with so many decode workers, or as many as somebody says."""
    found = graph(namespace, "llm")
    frontend, prefill, decoding = found["spec"]["components"]
    frontend["replicas"], prefill["replicas"] = frontends, 1
    del decoding["replicas"]
    if decode is not None:
        decoding["replicas"] = decode
    return found


def metrics_definition() -> dict[str, Any]:
    """What metrics-server serves, as objects that tests write."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "pods.metrics.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": "metrics.k8s.io",
            "scope": "Namespaced",
            "names": {"kind": "PodMetrics", "plural": "pods", "singular": "pod"},
            "versions": [version],
        },
    }


def measured(namespace: str, name: str, memory: str) -> dict[str, Any]:
    """How much memory a pod uses."""
    labels = {"kvrouter.dev/deployment": "llm", "kvrouter.dev/component": "decode"}
    return {
        "apiVersion": "metrics.k8s.io/v1beta1",
        "kind": "PodMetrics",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "timestamp": "2026-01-01T00:00:00Z",
        "window": "15s",
        "containers": [{"name": "main", "usage": {"cpu": "100m", "memory": memory}}],
    }


def pods(plane: ControlPlane, namespace: str) -> set[str]:
    """The names of the decode workers that are there to stay."""
    of = ("--namespace", namespace, "--selector", "kvrouter.dev/component=decode")
    found = plane.read("pods", *of)["items"]
    return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


def replicas(plane: ControlPlane, namespace: str) -> int:
    return int(plane.read("deployment", DECODE, "--namespace", namespace)["spec"]["replicas"])


def desired(number: int) -> str:
    return f'jsonpath={{.status.components[?(@.name=="decode")].desiredReplicas}}={number}'


async def scaled(plane: ControlPlane, namespace: str, number: int) -> None:
    await wait(plane, namespace, f"jsonpath={{.spec.replicas}}={number}", f"deployment/{DECODE}")


async def wait(plane: ControlPlane, namespace: str, wanted: str, what: str) -> None:
    words = ("wait", f"--for={wanted}", what, "--namespace", namespace, WAIT)
    await asyncio.to_thread(plane.kubectl, *words)
