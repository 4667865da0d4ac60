"""The number of a component's pods: whose it is, and how it changes hands."""

from typing import cast

import pytest
from pydantic import JsonValue

from kvrouter.kube.client import KubeClient
from kvrouter.kube.objects import Key, ResourceKind
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.operator.plan.plan import plan
from kvrouter.operator.reconcile.apply import HOLDER, WORKLOADS, release_replicas
from kvrouter.operator.status.resolved import component_status
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

OPERATOR, SCALER = "kvrouter-operator", "kube-controller-manager"
PLANNED: Manifest = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"namespace": "team", "name": "llm-decode"},
    "spec": {},
}


class Held:
    """A cluster with one Deployment, and who claimed what of it."""

    def __init__(self, there: Manifest | None) -> None:
        self.there = there
        self.claimed: list[tuple[str, Manifest]] = []

    async def read(self, _kind: ResourceKind, _key: Key) -> Manifest | None:
        return self.there

    async def claim(self, _kind: ResourceKind, manifest: Manifest, *, manager: str) -> Manifest:
        self.claimed.append((manager, manifest))
        return manifest


def held_by(*managers: tuple[str, str]) -> Manifest:
    fields: JsonValue = {"f:spec": {"f:replicas": {}}}
    entries: list[JsonValue] = [
        {"manager": manager, "operation": operation, "fieldsV1": fields} for manager, operation in managers
    ]
    others: JsonValue = {"manager": OPERATOR, "operation": "Apply", "fieldsV1": {"f:spec": {}}}
    metadata: Manifest = {
        "namespace": "team",
        "name": "llm-decode",
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [*entries, others],
    }
    return {"metadata": metadata, "spec": {"replicas": 3}}


async def test_replicas_owned_by_the_operator_alone_get_another_field_owner() -> None:
    cluster = Held(held_by((OPERATOR, "Apply")))
    await release_replicas(cast(KubeClient, cluster), WORKLOADS, PLANNED)
    ((manager, claimed),) = cluster.claimed
    assert manager == HOLDER != OPERATOR
    assert claimed["spec"] == {"replicas": 3}
    assert claimed["metadata"] == {
        "namespace": "team",
        "name": "llm-decode",
        "uid": "u",
        "resourceVersion": "7",  # else it might hold a number that somebody changed meanwhile
    }


@pytest.mark.parametrize(
    "there",
    [
        None,
        held_by((SCALER, "Update")),
        held_by((OPERATOR, "Apply"), (SCALER, "Update")),
        held_by((HOLDER, "Apply")),
        {"metadata": {}, "spec": {}},
        {"metadata": {}},
    ],
)
async def test_replicas_that_are_absent_or_owned_by_another_are_left_alone(there: Manifest | None) -> None:
    cluster = Held(there)
    await release_replicas(cast(KubeClient, cluster), WORKLOADS, PLANNED)
    assert cluster.claimed == []


def test_workload_has_replicas_only_where_its_component_states_them() -> None:
    stated = deployment(types=("frontend",))
    (component,) = stated.spec.components
    for replicas, expected in ((None, {}), (0, {"replicas": 0}), (4, {"replicas": 4})):
        part = component.model_copy(update={"replicas": replicas})
        of = stated.model_copy(update={"spec": stated.spec.model_copy(update={"components": (part,)})})
        planned = plan(of, FACTS, DEFAULTS)
        (workload,) = [each for each in planned.manifests if each["kind"] == "Deployment"]
        spec = cast(Manifest, workload["spec"])
        assert {key: spec[key] for key in spec if key == "replicas"} == expected
        scaled = component_status(part, {"spec": {"replicas": 9}})
        assert scaled.desired_replicas == (9 if replicas is None else replicas)
