"""What a deployment gives all of its components, and what takes precedence over it."""

from datetime import UTC, datetime

import pytest
from pydantic import JsonValue

from kvrouter.operator.api.deployment import DynamoGraphDeployment, read_deployment
from kvrouter.operator.plan.budgets import zone_budgets
from kvrouter.operator.plan.containers import registers_elsewhere
from kvrouter.operator.plan.plan import plan
from kvrouter.settings.problems import dotted
from tests.testing.operator_deployments import GROVE, validated
from tests.testing.planned_deployments import DEFAULTS, FACTS, at, environment, has, planned, templates

NOW = datetime(2026, 1, 1, tzinfo=UTC)

ZONE = "topology.kubernetes.io/zone"
POLICY: JsonValue = {"kvTransferPolicy": {"labelKey": ZONE, "domain": "zone"}}
SECRET: JsonValue = {"secretKeyRef": {"name": "hub", "key": "token"}}
TEAM: JsonValue = {"example.com/team": "search"}


def shared(pods: dict[str, JsonValue] | None = None, **spec: JsonValue) -> DynamoGraphDeployment:
    """A frontend and a decode worker; ``pods`` are templates by component."""
    reading = read_deployment(document(pods, **spec))
    assert reading.deployment is not None, reading.problems
    assert reading.unknown == ()
    return reading.deployment


def document(pods: dict[str, JsonValue] | None = None, **spec: JsonValue) -> dict[str, JsonValue]:
    engine: JsonValue = {"spec": {"containers": [{"name": "main", "image": "example.com/engine:1"}]}}
    of: dict[str, JsonValue] = {"frontend": {}, "decode": engine, **(pods or {})}
    components: list[JsonValue] = [
        {"name": kind, "type": kind, "podTemplate": template} for kind, template in of.items()
    ]
    metadata: JsonValue = {"name": "llm", "namespace": "fleet", "uid": "uid-1"}
    return {"metadata": metadata, "spec": {"components": components, **spec}}


def test_shared_labels_and_annotations_are_on_every_object_and_pod() -> None:
    of = shared(labels=TEAM, annotations={"example.com/owner": "a b"})
    found = planned(of)
    zones = zone_budgets(of, of.spec.components[1], ZONE, {"a": 1}, [], NOW, 0)
    assert {manifest["kind"] for manifest in found.manifests} == {
        *("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget")
    }
    for manifest in [*found.manifests, *zones]:
        assert at(manifest, "metadata", "labels", "example.com/team") == "search"
        assert at(manifest, "metadata", "labels", "app.kubernetes.io/name") == "kvrouter"
        assert at(manifest, "metadata", "annotations", "example.com/owner") == "a b"
    for template in templates(found).values():
        assert at(template, "metadata", "labels", "example.com/team") == "search"
        assert at(template, "metadata", "annotations") == {"example.com/owner": "a b"}
    selector = at(next(m for m in found.manifests if m["kind"] == "Deployment"), "spec", "selector")
    assert not has(at(selector, "matchLabels"), "example.com/team")


def test_pod_template_takes_precedence_over_shared_fields() -> None:
    own: JsonValue = {
        "metadata": {"labels": {"example.com/team": "ads"}, "annotations": {"a": "own"}},
        "spec": {
            "priorityClassName": "low",
            "containers": [
                {"name": "main", "image": "e", "env": [{"name": "A", "value": "own"}]},
                {"name": "side", "image": "e"},
            ],
        },
    }
    of = shared(
        {"decode": own},
        labels=TEAM,
        annotations={"a": "shared", "b": "shared"},
        env=[{"name": "A", "value": "shared"}, {"name": "B", "value": "shared"}],
        priorityClassName="high",
    )
    found = templates(planned(of))
    decode = found["decode"]
    assert at(decode, "metadata", "labels", "example.com/team") == "ads"
    assert at(decode, "metadata", "annotations") == {"a": "own", "b": "shared"}
    assert at(decode, "spec", "priorityClassName") == "low"
    assert at(found["frontend"], "spec", "priorityClassName") == "high"
    assert environment(decode)["A"] == "own"
    assert environment(decode)["B"] == environment(decode, 1)["A"] == "shared"
    # The operator's own labels take precedence over everybody's.
    forged: JsonValue = {"metadata": {"labels": {"kvrouter.dev/component": "forged"}}}
    frontend = templates(planned(shared({"frontend": forged})))["frontend"]
    assert at(frontend, "metadata", "labels", "kvrouter.dev/component") == "frontend"


def test_pod_with_a_numeric_priority_gets_no_shared_priority_class() -> None:
    own: JsonValue = {"spec": {"priority": 7}}
    found = templates(planned(shared({"frontend": own}, priorityClassName="high")))["frontend"]
    assert not has(at(found, "spec"), "priorityClassName")


def test_own_variables_may_refer_to_shared_variables() -> None:
    own: JsonValue = {
        "spec": {
            "containers": [{"name": "main", "image": "e", "env": [{"name": "URL", "value": "$(HOST)/x"}]}],
            "initContainers": [
                {"name": "side", "image": "e", "restartPolicy": "Always"},
                {"name": "once", "image": "e"},
            ],
        }
    }
    env: list[JsonValue] = [{"name": "HOST", "value": "h"}, {"name": "TOKEN", "valueFrom": SECRET}]
    template = templates(planned(shared({"decode": own}, env=env, experimental=POLICY)))["decode"]
    entries = at(template, "spec", "containers", 0, "env")
    assert isinstance(entries, list)
    assert entries[:2] == env
    assert {"name": "URL", "value": "$(HOST)/x"} in entries
    side = at(template, "spec", "initContainers", 1, "env")
    assert isinstance(side, list)
    assert side[:2] == env
    assert not has(at(template, "spec", "initContainers", 2), "env")


def test_shared_variable_takes_precedence_over_the_operators_default() -> None:
    of = shared(
        env=[{"name": "DYN_HTTP_PORT", "value": "9000"}, {"name": "KVROUTER_EVENT_PLANE", "value": "nats"}]
    )
    found = planned(of)
    frontend = environment(templates(found)["frontend"])
    assert frontend["DYN_HTTP_PORT"] == "9000"
    assert "DYN_EVENT_PLANE" not in frontend
    service = next(manifest for manifest in found.manifests if manifest["kind"] == "Service")
    assert at(service, "spec", "ports", 0, "port") == 9000
    assert registers_elsewhere(of.spec) is None
    elsewhere = shared(env=[{"name": "DYN_NAMESPACE", "value": "x"}])
    assert registers_elsewhere(elsewhere.spec) == "spec.env says DYN_NAMESPACE itself"


def test_shared_variable_that_the_policy_sets_is_left_out_with_a_warning() -> None:
    env: list[JsonValue] = [
        {"name": "A", "value": "a"},
        {"name": "KVROUTER_KV_TRANSFER_DOMAIN", "value": "rack"},
        {"name": "DYN_TOPOLOGY_MOUNT_PATH", "value": "/places"},
    ]
    found = planned(shared(env=env, experimental=POLICY))
    (warning,) = found.warnings
    assert dotted(warning.path) == "spec.env[1]"
    decode = environment(templates(found)["decode"])
    assert decode["DYN_KV_TRANSFER_DOMAIN"] == "zone"
    assert decode["DYN_TOPOLOGY_MOUNT_PATH"] == "/places"
    assert "KVROUTER_KV_TRANSFER_DOMAIN" not in decode
    assert planned(shared(env=env)).warnings == ()


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ({"labels": {"kvrouter.dev/component": "x"}}, "spec.labels.kvrouter.dev/component"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "spec.labels.app.kubernetes.io/name"),
        ({"labels": {"pod-template-hash": "x"}}, "spec.labels.pod-template-hash"),
        ({"labels": {"grove.io/topology.zone": "x"}}, "spec.labels.grove.io/topology.zone"),
        ({"labels": {ZONE: "x"}, "experimental": POLICY}, f"spec.labels.{ZONE}"),
        ({"labels": {"a b": "x"}}, "spec.labels.a b"),
        ({"labels": {"a": "b c"}}, "spec.labels.a"),
        ({"labels": {"a": "b" * 64}}, "spec.labels.a"),
        ({"annotations": {"kvrouter.dev/x": "x"}}, "spec.annotations.kvrouter.dev/x"),
        ({"annotations": {"a/b/c": "x"}}, "spec.annotations.a/b/c"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, "spec.env[1].name"),
        ({"env": [{"name": "A", "value": "a", "valueFrom": SECRET}]}, "spec.env[0]"),
        ({"env": [{"name": "1A", "value": "a"}]}, "spec.env[0].name"),
        ({"env": [{"name": "A", "value": 1}]}, "spec.env[0].value"),
        ({"env": [{"name": f"A{n}"} for n in range(65)]}, "spec.env"),
        ({"priorityClassName": "High!"}, "spec.priorityClassName"),
    ],
)
def test_mistake_in_a_shared_field_is_refused_at_its_field(spec: dict[str, JsonValue], where: str) -> None:
    verdict = validated(document(None, **spec), None, GROVE)
    assert [dotted(problem.path) for problem in verdict.problems] == [where]


def test_valid_shared_labels_are_admitted() -> None:
    labels: JsonValue = {"app.kubernetes.io/part-of": "search", "empty": "", ZONE: "a"}
    assert validated(document(labels=labels), None, GROVE).problems == ()


def test_pod_annotations_of_a_wrong_form_are_a_problem_at_their_path() -> None:
    of = shared({"frontend": {"metadata": {"annotations": []}}})
    (problem,) = plan(of, FACTS, DEFAULTS).problems
    assert dotted(problem.path) == "spec.components[0].podTemplate.metadata.annotations"


def test_operator_label_in_a_pod_template_is_overridden_with_a_warning() -> None:
    pod: JsonValue = {
        "metadata": {
            "labels": {"kvrouter.dev/component": "mine", "app.kubernetes.io/name": "kvrouter", "a": "b"}
        },
        "spec": {"containers": [{"name": "main", "image": "engine"}]},
    }
    found = planned(shared({"decode": pod}))
    (warning,) = found.warnings
    assert warning.path[-1] == "kvrouter.dev/component"
    assert "is decode: remove it here" in warning.must
    decode = templates(found)["decode"]
    assert at(decode, "metadata", "labels", "kvrouter.dev/component") == "decode"
    assert at(decode, "metadata", "labels", "a") == "b"


def test_env_sources_that_may_hold_operator_variables_are_warned_of() -> None:
    sources: JsonValue = [{"secretRef": {"name": "hub"}}]
    prefixed: JsonValue = [{"prefix": "HF_", "secretRef": {"name": "hub"}}]
    of_kvrouter: JsonValue = [{"prefix": "KVROUTER_EVENT", "configMapRef": {"name": "of-kvrouter"}}]
    own: JsonValue = [{"name": "DYN_NAMESPACE", "value": "mine"}]
    main: JsonValue = {"name": "main", "args": ["worker", "mock"], "envFrom": sources, "env": own}
    containers: JsonValue = [
        main,
        {"name": "plain", "image": "example.com/engine:1"},
        {"name": "hub", "image": "example.com/engine:1", "envFrom": prefixed},
        {"name": "events", "image": "example.com/engine:1", "envFrom": of_kvrouter},
    ]
    companion: JsonValue = {"name": "with", "image": "a", "restartPolicy": "Always", "envFrom": sources}
    before: JsonValue = {"name": "before", "image": "a", "envFrom": sources}
    pod: JsonValue = {"spec": {"containers": containers, "initContainers": [before, companion]}}
    found = planned(shared({"decode": pod}, experimental=POLICY, env=[{"name": "HF_HOME", "value": "/hub"}]))
    said = {
        dotted(warning.path).removeprefix("spec.components[1].podTemplate.spec."): warning.must
        for warning in found.warnings
        if warning.path[-1] == "envFrom"
    }
    assert set(said) == {f"containers[{index}].envFrom" for index in (0, 2, 3)} | {
        "initContainers[1].envFrom"
    }
    for name in ("DYN_DISCOVERY_BACKEND", "KVROUTER_HEALTH_PORT", "DYN_KV_TRANSFER_DOMAIN", "HF_HOME"):
        assert name in said["containers[0].envFrom"]
    assert "DYN_NAMESPACE" not in said["containers[0].envFrom"]  # the container says it itself
    assert ": HF_HOME." in said["containers[2].envFrom"]
    assert ": DYN_EVENT_PLANE." in said["containers[3].envFrom"]  # one variable under two names
