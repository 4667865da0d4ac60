"""What a component says of its rollout, its Service and its shared memory, and what becomes of it."""

import pytest
from pydantic import JsonValue

from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.names import is_nothing
from kvrouter.operator.plan.plan import Plan, plan
from kvrouter.settings.problems import dotted
from tests.testing.planned_deployments import DEFAULTS, FACTS, at, has, of_kind, templates

ENGINE: dict[str, JsonValue] = {"name": "main", "image": "example.com/engine:1"}


def planned(kind: str, pod: JsonValue = None, **fields: JsonValue) -> Plan:
    """A deployment of one component of this type."""
    template: JsonValue = pod or {"spec": {"containers": [ENGINE]}}
    component: JsonValue = {"name": "one", "type": kind, "podTemplate": template, **fields}
    spec: JsonValue = {"components": [component], "annotations": {"a": "all", "b": "all"}}
    reading = read_deployment({"metadata": {"name": "llm", "namespace": "fleet"}, "spec": spec})
    assert reading.deployment is not None, reading.problems
    assert reading.unknown == ()
    return plan(reading.deployment, FACTS, DEFAULTS)


@pytest.mark.parametrize(
    ("kind", "stated", "expected"),
    [
        ("frontend", None, {"maxSurge": 1, "maxUnavailable": 0}),
        ("decode", None, {"maxSurge": 0, "maxUnavailable": "25%"}),
        ("decode", {"rollingUpdate": {"maxUnavailable": 2}}, {"maxSurge": 0, "maxUnavailable": 2}),
        ("decode", {"rollingUpdate": {"maxSurge": "50%"}}, {"maxSurge": "50%", "maxUnavailable": "25%"}),
        ("frontend", {"type": "RollingUpdate"}, {"maxSurge": 1, "maxUnavailable": 0}),
        ("decode", {"type": "Recreate"}, None),
    ],
)
def test_rollout_strategy_is_the_components_or_its_types_default(
    kind: str, stated: JsonValue, expected: JsonValue
) -> None:
    fields: dict[str, JsonValue] = {} if stated is None else {"strategy": stated}
    spec = at(of_kind(planned(kind, **fields), "Deployment")["llm-one"], "spec")
    strategy: JsonValue = {"type": "RollingUpdate", "rollingUpdate": expected}
    assert at(spec, "strategy") == (strategy if expected else {"type": "Recreate"})
    assert not has(spec, "minReadySeconds")
    assert not has(spec, "progressDeadlineSeconds")


def test_rollout_seconds_of_a_component_are_those_of_its_deployment() -> None:
    found = planned("decode", minReadySeconds=900, progressDeadlineSeconds=3600)
    spec = at(of_kind(found, "Deployment")["llm-one"], "spec")
    assert (at(spec, "minReadySeconds"), at(spec, "progressDeadlineSeconds")) == (900, 3600)


@pytest.mark.parametrize(
    ("kind", "fields", "where", "words"),
    [
        (
            "frontend",
            {"strategy": {"rollingUpdate": {"maxSurge": 0}}},
            "strategy.rollingUpdate",
            "comes to maxSurge 0 and maxUnavailable 0: no pod could be replaced",
        ),
        (
            "decode",
            {"strategy": {"rollingUpdate": {"maxUnavailable": "0%"}}},
            "strategy.rollingUpdate",
            "comes to maxSurge 0 and maxUnavailable 0%",
        ),
        (
            "decode",
            {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
            "strategy.rollingUpdate",
            "is only for type: RollingUpdate",
        ),
        ("decode", {"minReadySeconds": 600}, "minReadySeconds", "must be below progressDeadlineSeconds"),
        ("decode", {"service": {"type": "NodePort"}}, "service", "belongs to the component of type frontend"),
        (
            "frontend",
            {"service": {"annotations": {"kvrouter.dev/x": "y"}}},
            "service.annotations.kvrouter.dev/x",
            "is the operator's own annotation",
        ),
        (
            "decode",
            {
                "sharedMemorySize": "1Gi",
                "podTemplate": {
                    "spec": {"containers": [ENGINE], "volumes": [{"name": "shared-memory", "emptyDir": {}}]}
                },
            },
            "sharedMemorySize",
            "podTemplate.spec.volumes has one of that name: leave one out",
        ),
    ],
)
def test_impossible_rollout_service_or_shared_memory_is_refused_at_its_field(
    kind: str, fields: dict[str, JsonValue], where: str, words: str
) -> None:
    problems = planned(kind, **fields).problems
    assert [dotted(problem.path) for problem in problems] == [f"spec.components[0].{where}"]
    assert words in problems[0].must


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sharedMemorySize", "8 GiB"),
        ("sharedMemorySize", "-1Gi"),
        ("sharedMemorySize", "9" * 40),
        ("sharedMemorySize", True),
        ("minReadySeconds", -1),
        ("progressDeadlineSeconds", 0),
        ("strategy.rollingUpdate.maxSurge", "1"),
        ("strategy.rollingUpdate.maxSurge", -1),
        ("strategy.type", "OnDelete"),
        ("service.type", "ExternalName"),
    ],
)
def test_a_value_of_a_wrong_form_is_refused_with_its_field_alone(field: str, value: JsonValue) -> None:
    for part in reversed(field.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    component: JsonValue = {"name": "one", "type": "frontend", **value}
    reading = read_deployment({"metadata": {"name": "llm"}, "spec": {"components": [component]}})
    assert [dotted(problem.path) for problem in reading.problems] == [f"spec.components[0].{field}"]


def test_service_has_the_stated_type_and_its_own_annotations() -> None:
    stated: JsonValue = {"type": "LoadBalancer", "annotations": {"a": "own", "c": "own"}}
    found = planned("frontend", service=stated)
    service = of_kind(found, "Service")["llm-one"]
    assert at(service, "spec", "type") == "LoadBalancer"
    assert at(service, "metadata", "annotations") == {"a": "own", "b": "all", "c": "own"}
    annotations = at(of_kind(found, "Deployment")["llm-one"], "metadata", "annotations")
    assert at(annotations, "a") == "all"
    assert at(of_kind(planned("frontend"), "Service")["llm-one"], "spec", "type") == "ClusterIP"


@pytest.mark.parametrize("size", ["8Gi", 1024, "0.5Gi"])
def test_shared_memory_is_mounted_in_containers_and_sidecars(size: JsonValue) -> None:
    own: JsonValue = {**ENGINE, "name": "own", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}]}
    before: JsonValue = {"name": "before", "image": "a"}
    along: JsonValue = {"name": "along", "image": "a", "restartPolicy": "Always"}
    spec: JsonValue = {"containers": [ENGINE, own], "initContainers": [before, along]}
    found = planned("decode", {"spec": spec}, sharedMemorySize=size)
    spec = at(templates(found)["one"], "spec")
    volume: JsonValue = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
    assert at(spec, "volumes") == [volume]
    mount: JsonValue = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert at(spec, "containers", 0, "volumeMounts") == mount
    assert at(spec, "initContainers", 1, "volumeMounts") == mount
    assert not has(at(spec, "initContainers", 0), "volumeMounts")
    (warning,) = [each for each in found.warnings if each.path[-1] == "volumeMounts"]
    assert dotted(warning.path) == "spec.components[0].podTemplate.spec.containers[1].volumeMounts"


@pytest.mark.parametrize("size", ["0", 0, "0Gi", None])
def test_shared_memory_size_of_zero_leaves_pods_unchanged(size: JsonValue) -> None:
    assert planned("decode", sharedMemorySize=size).manifests == planned("decode").manifests


def test_zero_amount_is_recognized_in_every_unit() -> None:
    assert [is_nothing(amount) for amount in (0, "0", "0%", "0.0Gi", "00", 1, "1%", "0.5Gi")] == [
        True
    ] * 5 + [False] * 3
