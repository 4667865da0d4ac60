"""The Helm chart: what it renders, for a table of values, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError, lint
from kubernetes_validate.utils import SchemaNotFoundError

from kvrouter.cli.operator.flags import operator_clean_up, operator_run
from tests.testing.helm_chart import (
    CHART,
    SHAPES,
    arguments,
    is_hook,
    notes,
    of_kind,
    one,
    pods_of,
    rendered,
    shape,
)

OLDEST = "1.30"
"""The oldest Kubernetes that Chart.yaml admits."""

WITHOUT_SCHEMA = {"Issuer", "Certificate", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
"""Kinds of others: Kubernetes has no schema of them."""


@pytest.mark.parametrize("name", SHAPES)
def test_manifests_fit_the_schemas_of_old_and_new_kubernetes(name: str) -> None:
    for manifest in shape(name):
        for version in (OLDEST, "1.37"):
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except SchemaNotFoundError:
                assert manifest["kind"] in WITHOUT_SCHEMA


@pytest.mark.parametrize("name", SHAPES)
def test_helm_lint_finds_nothing_to_fix(name: str) -> None:
    report = lint(CHART, SHAPES[name], strict=True)
    icon = "icon is recommended"
    assert [reported for reported in report["messages"] if icon not in reported["error"]] == []
    assert report["errors"] == []


@pytest.mark.parametrize("name", SHAPES)
def test_manifests_are_distinct_and_selectors_match_one_pod_template(name: str) -> None:
    manifests = shape(name)
    places = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in manifests
    ]
    assert len(set(places)) == len(places)
    templates = [
        each["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "StatefulSet", "Job")
        for each in of_kind(manifests, kind)
    ]
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector")
        if manifest["kind"] not in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
            continue
        wanted = selector.get("matchLabels", selector)
        assert len([labels for labels in templates if wanted.items() <= labels.items()]) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_pods_meet_the_restricted_standard_with_read_only_roots(name: str) -> None:
    for spec in pods_of(shape(name)):
        assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (
            True,
            65532,
        )
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume]
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_rendered_flag_exists_on_its_command(name: str) -> None:
    known = {flag for parameter in operator_run.params for flag in parameter.opts}
    assert set(arguments(shape(name))) <= known
    known = {flag for parameter in operator_clean_up.params for flag in parameter.opts}
    for job in of_kind(shape(name), "Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["kvrouter", "operator", "clean-up"]
        assert {argument.split("=")[0] for argument in container["args"]} <= known


def test_the_default_chart_renders_exactly_the_expected_objects() -> None:
    there = sorted(
        f"{each['kind']} {each['metadata']['name']}" for each in shape("default") if not is_hook(each)
    )
    assert there == [
        "ClusterRole kvrouter-deployments-editor",
        "ClusterRole kvrouter-deployments-viewer",
        "ClusterRole kvrouter-operator-definition",
        "ClusterRole kvrouter-operator-deployments",
        "ClusterRole kvrouter-operator-nodes",
        "ClusterRole kvrouter-operator-webhooks",
        "ClusterRoleBinding kvrouter-operator-definition",
        "ClusterRoleBinding kvrouter-operator-deployments",
        "ClusterRoleBinding kvrouter-operator-nodes",
        "ClusterRoleBinding kvrouter-operator-webhooks",
        "Deployment kvrouter-operator",
        "Lease kvrouter-operator",
        "MutatingWebhookConfiguration kvrouter-operator-binding",  # nobody reported of the cluster's policies
        "PodDisruptionBudget kvrouter-operator",
        "Role kvrouter-operator",
        "RoleBinding kvrouter-operator",
        "Secret kvrouter-operator-certificate",
        "Service kvrouter-operator",
        "Service kvrouter-operator-metrics",
        "ServiceAccount kvrouter-operator",
        "ValidatingWebhookConfiguration kvrouter-operator",
    ]
    assert one(shape("default"), "Deployment")["spec"]["replicas"] == 2


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"admission": {"bindingWebhok": "auto"}}, "'/admission': additional properties 'bindingWebhok'"),
    ({"admission": {"bindingWebhook": "perhaps"}}, "'/admission/bindingWebhook'"),
    ({"admission": {"failurePolicy": "fail"}}, "'/admission/failurePolicy'"),
    ({"certificate": {"from": "existing"}}, "'/certificate/caBundle'"),
    ({"certificate": {"from": "vault"}}, "'/certificate/from'"),
    ({"image": {"repository": "corp/kvrouter:1"}}, "'/image/repository'"),
    ({"image": {"digest": "sha256:12"}}, "'/image/digest'"),
    ({"replicas": 0}, "'/replicas'"),
    ({"fleets": {"natsServer": "nats.corp:4222"}}, "'/fleets/natsServer'"),
    ({"fleets": {"discovery": "file"}}, "'/fleets/discovery'"),
    ({"nats": {"jetstream": {"size": "8G"}}}, "'/nats/jetstream/size'"),
    ({"watchNamespace": "a,b"}, "'/watchNamespace'"),
    ({"rbac": {"nodes": "yes"}}, "'/rbac/nodes'"),
]


@pytest.mark.parametrize(("values", "reported"), REFUSED)
def test_an_invalid_value_is_refused_by_its_name(values: dict[str, object], reported: str) -> None:
    with pytest.raises(HelmValuesError) as refused:
        rendered(values)
    assert reported in str(refused.value)


@pytest.mark.parametrize(
    "fleets", [{"discovery": "nats"}, {"requestPlane": "nats"}, {"eventPlane": "jetstream"}]
)
def test_planes_on_nats_without_nats_are_refused(fleets: dict[str, str]) -> None:
    ((plane, backend),) = fleets.items()
    with pytest.raises(HelmRenderError, match=f"fleets.{plane} is {backend}: set nats.enabled to true"):
        rendered({"fleets": fleets})


def test_a_service_monitor_without_its_service_is_refused() -> None:
    with pytest.raises(HelmRenderError, match=r"serviceMonitor\.enabled needs metrics\.service"):
        rendered({"metrics": {"service": False, "serviceMonitor": {"enabled": True}}})
    assert of_kind(rendered({"metrics": {"service": False}}), "Service") != []


def test_the_values_schema_has_exactly_the_charts_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compared(part: dict[str, Any], value: object, at: str) -> None:
        if "properties" not in part or not isinstance(value, dict) or not value:
            return
        assert part["additionalProperties"] is False, at
        assert set(part["properties"]) - {"global"} == set(value), at
        for key, each in value.items():
            compared(part["properties"][key], each, f"{at}.{key}")

    compared(schema, values, "values")


def test_chart_has_the_project_version_and_no_definitions_of_its_own() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    paths = sorted((CHART.parents[1] / "crds").glob("*.yaml"))
    kustomization = yaml.safe_load((CHART.parents[1] / "crds" / "Kustomization").read_text())
    assert sorted(kustomization["resources"]) == [path.name for path in paths]
    for path in paths:
        metadata = yaml.safe_load(path.read_text())["metadata"]
        assert metadata["annotations"] == {"kvrouter.dev/definition": chart["appVersion"]}, path
        assert metadata["labels"] == {"app.kubernetes.io/part-of": "kvrouter"}, path
    assert not (CHART / "crds").exists()  # Helm 4 takes over those that another chart wrote


def test_the_notes_name_the_next_steps_and_disabled_parts() -> None:
    reported = notes()
    assert "kubectl rollout status deployment/kvrouter-operator --namespace kvrouter-system" in reported
    assert "looks after all namespaces" in reported
    assert "rbac.nodes is false" in notes({"rbac": {"nodes": False}})
    assert "the namespace fleets" in notes({"watchNamespace": "fleets"})
    assert "NATS for fleets" in notes({"nats": {"enabled": True}})


def test_paths_named_in_the_notes_exist() -> None:
    root = Path(__file__).parents[2]
    for word in (word.strip("(),.") for word in notes().split()):
        if word.startswith(("deploy/", "examples/")):
            assert (root / word).exists(), word
