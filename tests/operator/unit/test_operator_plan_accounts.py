"""Accounts of pods: what processes may do in the cluster, and that others may do nothing."""

import pytest
from pydantic import JsonValue

from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.plan import Plan
from kvrouter.settings.planes import DiscoveryBackend
from kvrouter.settings.problems import dotted
from tests.testing.planned_deployments import at, deployment, has, of_kind, planned, templates

OVER_NATS = PlanDefaults(image="i", discovery=DiscoveryBackend.NATS, nats_server="nats://n:4222")
ENGINE: JsonValue = [{"name": "main", "image": "e"}]


def test_frontends_and_workers_get_the_roles_that_discovery_needs() -> None:
    found = planned(deployment())
    roles = of_kind(found, "Role")
    assert {name: at(role, "rules") for name, role in roles.items()} == {
        "llm-frontends": [
            rule("list", "watch", "delete"),
            rule("list", "create", "patch", "delete", kind="kvroutercordons"),
        ],
        "llm-workers": [rule("get", "create", "update")],
    }
    for name, binding in of_kind(found, "RoleBinding").items():
        assert at(binding, "roleRef", "name") == name
        assert at(binding, "subjects") == [{"kind": "ServiceAccount", "name": name, "namespace": "fleet"}]
    assert set(of_kind(found, "ServiceAccount")) == set(roles)
    for kind in ("Role", "RoleBinding", "ServiceAccount"):
        for manifest in of_kind(found, kind).values():
            assert at(manifest, "metadata", "ownerReferences", 0, "uid") == "uid-1"
            assert at(manifest, "metadata", "labels", "app.kubernetes.io/managed-by") == "kvrouter-operator"
            assert at(manifest, "metadata", "labels", "kvrouter.dev/deployment") == "llm"
    assert accounts_of(found) == {
        "frontend": "llm-frontends",
        "prefill": "llm-workers",
        "decode": "llm-workers",
        "worker": "llm-workers",
    }


def test_deployment_of_frontends_alone_has_one_role() -> None:
    assert set(of_kind(planned(deployment(types=("frontend",))), "Role")) == {"llm-frontends"}


def test_over_nats_pods_have_no_account_and_no_token() -> None:
    found = planned(deployment(), defaults=OVER_NATS)
    assert {str(manifest["kind"]) for manifest in found.manifests} == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    for template in templates(found).values():
        assert at(template, "spec", "automountServiceAccountToken") is False
        assert not has(at(template, "spec"), "serviceAccountName")


@pytest.mark.parametrize(
    "said",
    [{"automountServiceAccountToken": True}, {"serviceAccountName": "mine"}, {"serviceAccount": "mine"}],
)
def test_over_nats_account_settings_of_a_pod_template_are_kept(said: dict[str, JsonValue]) -> None:
    of = deployment(pods={"decode": {"spec": {"containers": ENGINE, **said}}})
    found = planned(of, defaults=OVER_NATS)
    spec = at(templates(found)["decode"], "spec")
    assert isinstance(spec, dict)
    kept = {key: spec[key] for key in spec if "ervice" in key and key != "enableServiceLinks"}
    assert (kept, found.warnings) == (said, ())


@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
def test_account_named_by_the_user_is_kept_with_a_warning_of_its_role(field: str) -> None:
    found = planned(deployment(pods={"decode": {"spec": {"containers": ENGINE, field: "mine"}}}))
    spec = at(templates(found)["decode"], "spec")
    assert isinstance(spec, dict)
    assert {key: spec[key] for key in spec if "ervice" in key and key != "enableServiceLinks"} == {
        field: "mine"
    }
    (warning,) = found.warnings
    assert dotted(warning.path) == "spec.components[2].podTemplate.spec.serviceAccountName"
    assert warning.must == (
        "is your own account, which needs what the Role llm-workers allows: kubectl create rolebinding "
        "mine-llm-workers --role=llm-workers --serviceaccount=fleet:mine --namespace=fleet"
    )
    assert "llm-workers" in of_kind(found, "Role")


def test_pod_without_a_token_that_it_needs_is_warned_of() -> None:
    template: JsonValue = {"spec": {"containers": ENGINE, "automountServiceAccountToken": False}}
    found = planned(deployment(pods={"decode": template}))
    (warning,) = found.warnings
    assert dotted(warning.path) == "spec.components[2].podTemplate.spec.automountServiceAccountToken"
    assert at(templates(found)["decode"], "spec", "automountServiceAccountToken") is False


def rule(*verbs: str, kind: str = "kvrouterworkers") -> JsonValue:
    return {"apiGroups": ["kvrouter.dev"], "resources": [kind], "verbs": [*verbs]}


def accounts_of(found: Plan) -> dict[str, JsonValue]:
    return {kind: at(template, "spec", "serviceAccountName") for kind, template in templates(found).items()}
