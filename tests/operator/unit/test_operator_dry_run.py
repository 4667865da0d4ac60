"""What a deployment would become is tried before it is stored: which refusals count, and which do not."""

import asyncio
from typing import cast

import pytest

from kvrouter.kube.client import ClusterLost, KubeClient, RequestRefused
from kvrouter.kube.objects import Key, Manifest, ResourceKind, key_of, metadata_of
from kvrouter.operator.admission.review import Review
from kvrouter.operator.admission.validate import changed_manifests
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.plan.manifest import MANAGER
from kvrouter.operator.reconcile.dry_run import DryRun
from tests.testing.operator_deployments import Document, deployment
from tests.testing.planned_deployments import DEFAULTS

DECODE = "my-llm-decode"
WITHIN_S = 60.0
SERVICE = ResourceKind("v1", "Service", "services")


class Server:
    """An API server that answers a trial of some objects so."""

    def __init__(self, **answers: Exception) -> None:
        self.answers = {name.replace("_", "-"): error for name, error in answers.items()}
        self.tried: list[str] = []
        self.there: Manifest | None = None
        self.hangs = False

    async def dry_run(self, kind: ResourceKind, manifest: Manifest) -> None:
        name = key_of(manifest).name
        self.tried.append(f"{kind.name} {name}")
        if self.hangs:
            await asyncio.Event().wait()
        if kind.name == "Deployment" and name in self.answers:
            raise self.answers[name]

    async def read(self, _kind: ResourceKind, _key: Key) -> Manifest | None:
        return self.there

    def dry_runs(self, *, namespace: str = "") -> DryRun:
        return DryRun(cast(KubeClient, self), defaults=DEFAULTS, namespace=namespace)


def refused(said: str, status: int = 422) -> RequestRefused:
    return RequestRefused(f"PATCH /x: {said}", status=status, detail=said)


def review(new: Document, old: Document | None = None) -> Review:
    return Review("1", "CREATE" if old is None else "UPDATE", True, new, old)


def with_env(name: str) -> Document:
    found = deployment()
    components = cast(list[Document], cast(Document, found["spec"])["components"])
    template: Document = {
        "containers": [{"name": "main", "image": "e:1", "env": [{"name": name, "value": "1"}]}]
    }
    components[2] = {**components[2], "podTemplate": {"spec": template}}
    return found


async def test_creation_dry_runs_every_object_except_role_bindings() -> None:
    server = Server()
    verdict = await server.dry_runs()(review(deployment()), ClusterInfo(), WITHIN_S)
    assert verdict == ((), ())
    assert sorted(server.tried) == [
        "Deployment my-llm-decode",
        "Deployment my-llm-frontend",
        "Deployment my-llm-prefill",
        "PodDisruptionBudget my-llm-decode",
        "PodDisruptionBudget my-llm-frontend",
        "PodDisruptionBudget my-llm-prefill",
        "Role my-llm-frontends",
        "Role my-llm-workers",
        "Service my-llm-frontend",
        "ServiceAccount my-llm-frontends",
        "ServiceAccount my-llm-workers",
    ]


async def test_update_dry_runs_only_changed_objects() -> None:
    server = Server()
    await server.dry_runs()(review(with_env("B"), with_env("A")), ClusterInfo(), WITHIN_S)
    assert server.tried == [f"Deployment {DECODE}"]
    await server.dry_runs()(review(with_env("B"), with_env("B")), ClusterInfo(), WITHIN_S)
    leaving = with_env("C")
    leaving["metadata"] = {**cast(Document, leaving["metadata"]), "deletionTimestamp": "now"}
    await server.dry_runs()(review(leaving, with_env("B")), ClusterInfo(), WITHIN_S)
    await server.dry_runs(namespace="elsewhere")(
        review(with_env("C"), with_env("B")), ClusterInfo(), WITHIN_S
    )
    assert server.tried == [f"Deployment {DECODE}"]


@pytest.mark.parametrize(
    "error",
    [
        refused('Deployment.apps "x" is invalid: spec.template: no'),
        refused('deployments.apps "x" is forbidden: exceeded quota: few', 403),
        refused('admission webhook "x" denied the request: no', 403),
        refused("failed to create typed patch object (a/b; apps/v1): .spec.x: field not declared", 500),
        refused("failed to convert new object (a/b; apps/v1) to proper version: quantities must match", 500),
    ],
)
async def test_refusal_of_an_object_is_reported_at_its_component(error: RequestRefused) -> None:
    verdict = await Server(my_llm_decode=error).dry_runs()(review(deployment()), ClusterInfo(), WITHIN_S)
    (problem,) = verdict.problems
    assert problem.path == ("spec", "components", 2)
    assert problem.must == f"the API server would refuse Deployment {DECODE}: {error.detail}"


@pytest.mark.parametrize(
    "error",
    [
        refused('deployments.apps "x" is forbidden: User "op" cannot patch resource "deployments"', 403),
        refused('roles "x" is forbidden: user "o" (groups=[]) is attempting to grant RBAC permissions', 403),
        refused('admission webhook "x" does not support dry run', 400),
        refused('failed calling webhook "x": no endpoints', 500),
        refused("too many requests", 429),
        ClusterLost("PATCH /x: connection refused"),
    ],
)
async def test_dry_run_that_cannot_be_made_is_a_warning(error: Exception) -> None:
    verdict = await Server(my_llm_decode=error).dry_runs()(review(deployment()), ClusterInfo(), WITHIN_S)
    assert verdict.is_allowed
    (warning,) = verdict.warnings
    assert warning.must.startswith(
        "was not tried at the API server beforehand, so see its status: Deployment"
    )


async def test_unanswered_dry_run_is_allowed_with_a_warning_after_a_timeout() -> None:
    server = Server()
    server.hangs = True
    verdict = await server.dry_runs()(review(deployment()), ClusterInfo(), 0.05)
    assert verdict.is_allowed
    assert "no answer within 0.05 s" in verdict.warnings[0].must


async def test_refusal_of_an_object_of_another_owner_does_not_count() -> None:
    server = Server(my_llm_decode=refused("field is immutable"))
    new = deployment()
    new["metadata"] = {**cast(Document, new["metadata"]), "uid": "mine"}
    server.there = {"metadata": {"name": DECODE, "ownerReferences": [{"uid": "other", "controller": True}]}}
    assert metadata_of(server.there)["name"] == DECODE
    assert (await server.dry_runs()(review(new), ClusterInfo(), WITHIN_S)).is_allowed
    server.there = {"metadata": {"name": DECODE, "ownerReferences": [{"uid": "mine", "controller": True}]}}
    assert not (await server.dry_runs()(review(new), ClusterInfo(), WITHIN_S)).is_allowed


async def test_refusal_of_a_leftover_object_that_would_be_adopted_counts() -> None:
    server = Server(my_llm_decode=refused("field is immutable"))
    new = deployment()
    new["metadata"] = {**cast(Document, new["metadata"]), "uid": "mine"}
    planned = changed_manifests(new, None, ClusterInfo(), DEFAULTS)
    left = next(dict(each) for _, each in planned if key_of(each).name == DECODE)
    written: Document = {"manager": MANAGER, "operation": "Apply"}
    server.there = {"metadata": {**metadata_of(left), "ownerReferences": [], "managedFields": [written]}}
    assert not (await server.dry_runs()(review(new), ClusterInfo(), WITHIN_S)).is_allowed
    server.there = {"metadata": {**metadata_of(left), "ownerReferences": [], "managedFields": []}}
    assert (await server.dry_runs()(review(new), ClusterInfo(), WITHIN_S)).is_allowed
