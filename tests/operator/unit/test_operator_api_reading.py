"""From JSON to a deployment, and every mistake in words."""

import json
from typing import cast

import pytest
from pydantic import JsonValue

from kvrouter.core.workers import Enforcement
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.operator.api import deployment as deployment_module
from kvrouter.operator.api.deployment import UNKNOWN_MAX, ComponentType, read_deployment
from kvrouter.operator.api.status import ComponentStatus, DeploymentStatus
from kvrouter.operator.plan.manifest import TYPE_LABEL, selector
from kvrouter.settings.problems import dotted
from tests.testing.calls import WatchCalls
from tests.testing.operator_deployments import Document, deployment


def reported(document: object) -> list[str]:
    return [f"{dotted(problem.path)}: {problem.must}" for problem in read_deployment(document).problems]


def test_omitted_fields_have_their_defaults() -> None:
    found = read_deployment(
        deployment(frontend={"level": "zone"}, graph={"domain": "zone", "labelKey": "a.b/c"})
    ).deployment
    assert found is not None
    frontend, prefill, _ = found.spec.components
    assert [component.type for component in found.spec.components] == [
        ComponentType.FRONTEND,
        ComponentType.PREFILL,
        ComponentType.DECODE,
    ]
    assert (prefill.replicas, frontend.pod_template, prefill.type.is_worker) == (None, {}, True)
    assert frontend.kv_cache_transfer_topology is not None
    assert frontend.kv_cache_transfer_topology.mismatch_policy is MismatchPolicy.FAIL
    assert not frontend.type.is_worker
    assert found.spec.experimental is not None
    assert found.spec.experimental.kv_transfer_policy is not None
    assert found.spec.experimental.kv_transfer_policy.enforcement is Enforcement.REQUIRED


def test_a_pod_template_is_kept_whole() -> None:
    document = deployment()
    template: JsonValue = {"spec": {"containers": [{"name": "main", "x": [1, {"y": None}]}]}}
    document["spec"] = {"components": [{"name": "a", "type": "worker", "podTemplate": template}]}
    found = read_deployment(document).deployment
    assert found is not None
    assert found.spec.components[0].pod_template == template


def change(path: str, value: JsonValue) -> Document:
    """A whole deployment in which one field is another."""
    document: Document = deployment(
        frontend={"level": "zone"},
        graph={"domain": "zone", "labelKey": "a.b/c"},
        topology="fabric",
    )
    here: JsonValue = document
    *way, last = path.split(".")
    for part in way:
        here = here[int(part)] if isinstance(here, list) else cast(Document, here)[part]
    cast(Document, here)[last] = value
    return document


POLICY = "spec.experimental.kvTransferPolicy"
TRANSFER = "spec.components.0.kvCacheTransferTopology"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.components.1.replicas", -1, "must be ≥ 0, not -1"),
        ("spec.components.1.replicas", "8", "must be a whole number, not '8'"),
        ("spec.components.1.replicas", True, "must be a whole number, not true"),
        ("spec.components.1.type", "decoder", "must be 'frontend', 'prefill', 'decode' or 'worker', not"),
        ("spec.components.1.name", "a_b", "must be a component's name: ≤ 63 letters, digits and '-'"),
        ("spec.components.1.name", "x" * 64, "must be a component's name"),
        ("spec.components", [], "must not be empty"),
        ("spec.topologyConstraint.clusterTopologyName", "Fabric", "must be an object's name"),
        (f"{TRANSFER}.level", "Zone", "must be a domain such as zone"),
        (f"{TRANSFER}.level", "rack-", "must be a domain such as zone"),
        (f"{TRANSFER}.level", "zone\n", "must be a domain such as zone"),
        (f"{TRANSFER}.mismatchPolicy", "ignore", "must be 'fail' or 'fallback', not 'ignore'"),
        (f"{TRANSFER}.label", "topology.kubernetes.io/", "must be the key of a label"),
        (f"{TRANSFER}.label", "a." * 130 + "a/b", "must have ≤ 253 characters before its '/'"),
        (f"{POLICY}.labelKey", "x/" + "y" * 64, "must be the key of a label"),
        *(
            (f"{POLICY}.labelKey", key, "must be the key of a node label, and pods are found by this one")
            for key in ("pod-template-hash", TYPE_LABEL, *selector("llm", "decode"))
        ),
        (f"{POLICY}.enforcement", "soft", "must be 'required', 'preferred' or 'fallback', not 'soft'"),
        (f"{POLICY}.preferredWeight", 1.5, "must be ≤ 1, not 1.5"),
        (f"{POLICY}.preferredWeight", float("nan"), "must be a finite number"),
        (f"{POLICY}.domain", None, "must be text"),
    ],
)
def test_mistake_is_reported_with_its_field_and_the_valid_values(
    path: str, value: JsonValue, message: str
) -> None:
    (line,) = reported(change(path, value))
    where = path.replace("components.0", "components[0]").replace("components.1", "components[1]")
    assert line.startswith(f"{where}: {message}")


def test_all_mistakes_are_reported_at_once() -> None:
    assert reported({"spec": {"components": [{"type": "prefill"}, {"name": "b"}]}}) == [
        "spec.components[0].name: is required",
        "spec.components[1].type: is required",
    ]
    assert reported({}) == ["spec: is required"]
    assert reported([]) == [": must be an object"]


@pytest.mark.parametrize("depth", [300, 900])
def test_pod_template_nested_too_deeply_is_reported_in_one_line(depth: int) -> None:
    deep = cast(JsonValue, json.loads('{"a":' * depth + "1" + "}" * depth))
    assert reported(change("spec.components.1.podTemplate", deep)) == [
        "spec.components[1].podTemplate: has too many parts inside each other"
    ]


def test_field_name_in_snake_case_is_reported_as_unknown() -> None:
    document = deployment()
    document["spec"] = {"components": [{"name": "a", "type": "worker", "pod_template": {"x": 1}}]}
    reading = read_deployment(document)
    assert reading.deployment is not None
    assert reading.deployment.spec.components[0].pod_template == {}
    (unknown,) = reading.unknown
    assert dotted(unknown.path) == "spec.components[0].pod_template"
    assert unknown.must.endswith("has no effect (did you mean podTemplate?)")


def test_unknown_fields_beyond_the_limit_are_counted_and_not_named(
    watch_calls: WatchCalls,
) -> None:
    """The search for the nearest name takes 32 µs a field: 16 s for an object of 6 MB."""
    searched = watch_calls(deployment_module, "did_you_mean")
    document = deployment()
    document["more"] = 1
    document["spec"] = {**cast(Document, document["spec"]), **{f"podTemplates{n}": n for n in range(100_000)}}
    found = [f"{dotted(problem.path)}: {problem.must}" for problem in read_deployment(document).unknown]
    assert len(found) == UNKNOWN_MAX + 1
    assert found[0].startswith("more: is no field of this form")
    assert found[1].startswith("spec.podTemplates0: is no field of this form")
    assert found[-1] == f": has {100_001 - UNKNOWN_MAX:d} more fields that have no effect"
    assert len(searched) == UNKNOWN_MAX


def test_invalid_status_does_not_affect_reading_the_spec() -> None:
    """The operator writes it and reads its own: whatever is in it, the spec is read."""
    assert read_deployment({**deployment(), "status": {"conditions": "none"}}).problems == ()


def test_status_is_written_in_camel_case() -> None:
    status = DeploymentStatus(
        observed_generation=3, components=(ComponentStatus(name="a", type="decode", ready_replicas=2),)
    )
    assert status.model_dump(by_alias=True, mode="json", exclude_none=True, exclude_defaults=True) == {
        "observedGeneration": 3,
        "components": [{"name": "a", "type": "decode", "readyReplicas": 2}],
    }
