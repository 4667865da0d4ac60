"""Whose a deployment is: by an annotation, which most do not have."""

import asyncio

import pytest

from kvrouter.kube.objects import Manifest
from kvrouter.operator.api.deployment import class_of
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS, NODES
from kvrouter.operator.labels.binding import BindingTarget
from kvrouter.operator.reconcile.binding_labels import BindingLabels
from tests.testing.static_cluster import StaticCluster

ZONE = "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"metadata": {"annotations": {"kvrouter.dev/class": "blue"}}}, "blue"),
        ({"metadata": {"annotations": {"kvrouter.dev/class": 3}}}, "kvrouter"),
        ({"metadata": {"annotations": {}}}, "kvrouter"),
        ({"metadata": {"annotations": None}}, "kvrouter"),
        ({"metadata": None}, "kvrouter"),
        ({}, "kvrouter"),
        (None, "kvrouter"),
        ([], "kvrouter"),
    ],
)
def test_the_class_is_the_annotation_or_the_default(document: object, expected: str) -> None:
    assert class_of(document) == expected


def graph(name: str, *, of_class: str) -> Manifest:
    annotations: Manifest = {"kvrouter.dev/class": of_class}
    components: list[Manifest] = [{"name": kind, "type": kind} for kind in ("frontend", "prefill", "decode")]
    return {
        "metadata": {"namespace": "team", "name": name, "resourceVersion": "1", "annotations": annotations},
        "spec": {
            "components": [*components],
            "experimental": {"kvTransferPolicy": {"labelKey": ZONE, "domain": "zone"}},
        },
    }


async def test_a_binding_is_labelled_for_workers_of_the_operators_class_alone() -> None:
    graphs = [graph("blue", of_class="blue"), graph("other", of_class="green")]
    node: Manifest = {"metadata": {"name": "node", "labels": {ZONE: "a"}}}
    cluster = StaticCluster({DEPLOYMENTS_OF_GRAPHS: graphs, NODES: [node]})
    places = BindingLabels(cluster, namespace="", lost=lambda _kind, _error: None, class_name="blue")
    following = asyncio.create_task(places.run())
    async with asyncio.timeout(30.0):
        await cluster.watched.wait()
    for name, expected in (("blue", {ZONE: "a"}), ("other", {})):
        assert await places.labels_of(BindingTarget("team", f"{name}-decode-6bf4-x2c5d", "node")) == expected
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
