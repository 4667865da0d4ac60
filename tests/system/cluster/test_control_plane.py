"""What the operator rests on, shown on a real control plane."""

import asyncio
import json
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, ApiException
from kubernetes.aio.dynamic import DynamicClient

from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane, Features, KubectlError
from tests.system.cluster.nodes import RACK, REGION, ZONE, ZONES
from tests.system.cluster.pods import BY_HAND, bound, bound_by_hand, pod, pod_spec
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.processes import eventually

FAILS_WITHIN_S = 60.0


@pytest.mark.api_server
def test_etcd_and_the_api_server_serve_before_another_server_is_started(plane: ControlPlane) -> None:
    assert set(plane.rss_bytes()) == {"etcd", "kube-apiserver"}
    assert plane.read("nodes")["items"] == []


def test_both_features_for_labels_at_binding_are_on(plane: ControlPlane) -> None:
    assert plane.features() == Features(mutating_admission_policy=True, copies_binding_labels=True)


def test_a_failed_clean_up_is_reported_unless_the_test_failed(plane: ControlPlane) -> None:
    with pytest.raises(ZeroDivisionError), plane.deleting("node", "absent"):
        raise ZeroDivisionError
    with pytest.raises(KubectlError, match='nodes "absent" not found'), plane.deleting("node", "absent"):
        pass


@pytest.mark.parametrize(
    "waits",
    [
        ("wait", "--for=condition=Ready", "pods", "--all"),
        ("wait", "--for=condition=Ready", "pod", "--selector", "app=many"),
        ("wait", "--for=condition=Available", "deployment/many"),
        ("rollout", "status", "deployment/many"),
    ],
)
def test_kubectl_waits_for_objects_that_do_not_exist_yet(
    plane: ControlPlane, namespace: str, waits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = threading.Event()
    asked = plane._kubectl

    def heard(*arguments: str, **more: Any) -> Any:
        try:
            return asked(*arguments, **more)
        except KubectlError:
            has_failed.set()
            raise

    monkeypatch.setattr(plane, "_kubectl", heard)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(plane.kubectl, *waits, "--namespace", namespace, "--timeout=120s")
        assert has_failed.wait(FAILS_WITHIN_S)
        plane.apply(_deployment(namespace, replicas=2))
        waited.result()


def test_an_invalid_wait_condition_is_reported_at_once(plane: ControlPlane, namespace: str) -> None:
    with pytest.raises(KubectlError, match="unrecognized condition"):
        plane.kubectl("wait", "--for=nothing", "pods", "--all", "--namespace", namespace)


def test_a_deployments_pods_become_ready_in_three_zones(plane: ControlPlane, namespace: str) -> None:
    plane.apply(_deployment(namespace, replicas=6))
    plane.kubectl("rollout", "status", "deployment/many", "--namespace", namespace, "--timeout=120s")
    pods = plane.read("pods", "--namespace", namespace)["items"]
    zones = Counter(pod["metadata"]["labels"][ZONE] for pod in pods)
    assert zones == dict.fromkeys(ZONES, 2)


def test_owned_objects_are_deleted_with_their_owner(plane: ControlPlane, namespace: str) -> None:
    plane.apply(_deployment(namespace, replicas=2))
    plane.kubectl("rollout", "status", "deployment/many", "--namespace", namespace, "--timeout=120s")
    owner = plane.read("deployment", "many", "--namespace", namespace)["metadata"]["uid"]
    owned = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "many", "uid": owner}
    settings = {"namespace": namespace, "name": "settings", "ownerReferences": [owned]}
    plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": settings})
    plane.kubectl("delete", "deployment", "many", "--namespace", namespace)
    for kind in ("replicasets", "pods", "configmap/settings"):
        gone = ("wait", "--for=delete", kind, "--namespace", namespace, "--timeout=120s")
        plane.kubectl(*gone, *(["--all"] if "/" not in kind else []))


def test_a_pod_played_by_hand_is_left_alone(plane: ControlPlane, namespace: str) -> None:
    plane.apply(pod(namespace, "by-hand", BY_HAND), pod(namespace, "other"))
    plane.kubectl("wait", "--for=condition=Ready", "pod/other", "--namespace", namespace, "--timeout=120s")
    scheduled = ("wait", "--for=condition=PodScheduled", "pod/by-hand", "--namespace", namespace)
    plane.kubectl(*scheduled, "--timeout=120s")
    plane.kubectl("delete", "pods", "--all", "--namespace", namespace, "--wait=false")
    plane.kubectl("wait", "--for=delete", "pod/other", "--namespace", namespace, "--timeout=120s")
    left = plane.read("pod", "by-hand", "--namespace", namespace)
    assert left["status"]["phase"] == "Pending"
    assert "deletionTimestamp" in left["metadata"]
    plane.kubectl("delete", "pod", "by-hand", "--namespace", namespace, "--force", "--grace-period=0")


async def test_a_crds_rule_refuses_with_its_own_message(plane: ControlPlane, namespace: str) -> None:
    plane.apply(_crd())
    plane.kubectl("wait", "--for=condition=Established", "crd/links.kvrouter.test", "--timeout=120s")
    link = {
        "apiVersion": "kvrouter.test/v1",
        "kind": "Link",
        "metadata": {"namespace": namespace, "name": "l"},
    }
    plane.apply({**link, "spec": {"enforcement": "preferred", "weight": 1}})
    with pytest.raises(KubectlError, match="spec: Invalid value: weight needs enforcement: preferred"):
        plane.apply({**link, "spec": {"enforcement": "required", "weight": 1}})

    async def is_explained() -> bool:
        try:
            return "Whether KV may cross" in plane.kubectl("explain", "links.spec.enforcement")
        except KubectlError:
            return False

    await eventually(is_explained)
    plane.kubectl("delete", "crd", "links.kvrouter.test")


async def test_fields_applied_by_two_managers_conflict(
    api: ApiClient, namespace: str, tmp_path: Path
) -> None:
    dynamic = await DynamicClient(api, cache_file=str(tmp_path / "kinds.json"))
    config_maps = await dynamic.resources.get(api_version="v1", kind="ConfigMap")
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    for manager, data in (("one", {"mode": "kv"}), ("two", {"other": "1"}), ("one", {"mode": "random"})):
        await config_maps.server_side_apply(
            namespace=namespace, body={**settings, "data": data}, field_manager=manager
        )
    theirs = {**settings, "data": {"other": "1", "mode": "mine"}}
    with pytest.raises(ApiException) as refused:
        await config_maps.server_side_apply(namespace=namespace, body=theirs, field_manager="two")
    assert refused.value.status == 409
    assert json.loads(refused.value.body or "{}")["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.mode"}
    ]
    await config_maps.server_side_apply(
        namespace=namespace, body=theirs, field_manager="two", force_conflicts=True
    )


async def test_a_pod_has_zone_and_region_in_the_event_of_its_binding(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    for i in range(3):
        seen = await bound(plane, api, pod(namespace, f"pod-{i}", {ZONE: "forged"}))
        node = plane.read("node", seen["spec"]["nodeName"])
        for name in (ZONE, REGION):
            assert seen["metadata"]["labels"][name] == node["metadata"]["labels"][name]


def test_a_bindings_labels_and_annotations_are_copied_to_its_pod(plane: ControlPlane, namespace: str) -> None:
    metadata = bound_by_hand(plane, namespace)["metadata"]
    assert (metadata["labels"][RACK], metadata["annotations"][RACK]) == ("said", "said")


async def test_a_policy_sets_the_nodes_rack_in_the_write_that_binds(
    plane: ControlPlane, api: ApiClient, namespace: str
) -> None:
    plane.apply(*_rack_policy(namespace))
    names = (f"pod-{i}" for i in count())
    seen: dict[str, Any] = {}

    async def is_in_force() -> bool:
        seen.update(await bound(plane, api, pod(namespace, next(names), {RACK: "forged"})))
        return bool(seen["metadata"]["labels"][RACK] != "forged")

    await eventually(is_in_force)
    node = plane.read("node", seen["spec"]["nodeName"])
    assert seen["metadata"]["labels"][RACK] == node["metadata"]["labels"][RACK]
    plane.kubectl("delete", "mutatingadmissionpolicy,mutatingadmissionpolicybinding", f"rack-{namespace}")


@pytest.mark.parametrize("way", ["url", "service"])
async def test_a_webhook_is_called_over_https(plane: ControlPlane, namespace: str, way: str) -> None:
    async with _door(plane, f"door.{namespace}.svc") as port:
        if way == "service":
            plane.lead_service(namespace, "door")
            service = {"namespace": namespace, "name": "door", "port": port, "path": "/validate"}
            target: dict[str, object] = {"service": service}
        else:
            target = {"url": f"https://{LOOPBACK}:{port}/validate"}
        plane.apply(_webhook(plane, namespace, target))
        settings = {"metadata": {"namespace": namespace, "name": "settings"}}
        said = await _refusal(plane, {"apiVersion": "v1", "kind": "ConfigMap", **settings})
        assert 'admission webhook "door.kvrouter.test" denied the request: no' in said
        plane.kubectl("delete", "validatingwebhookconfiguration", f"door-{namespace}")


def test_users_and_accounts_have_only_the_rights_of_their_roles(plane: ControlPlane, namespace: str) -> None:
    where = ("--namespace", namespace)
    plane.kubectl("create", "role", "reader", "--verb=get,list", "--resource=pods", *where)
    plane.kubectl("create", "serviceaccount", "account", *where)
    plane.kubectl(
        "create", "rolebinding", "readers", "--role=reader", "--user=eve", *where,
        f"--serviceaccount={namespace}:account",
    )  # fmt: skip
    plane.until_granted("eve", "list", "pods", namespace)
    for config in (plane.kubeconfig("eve"), plane.account_kubeconfig(namespace, "account")):
        assert plane.kubectl("get", "pods", *where, kubeconfig=config) == ""
        with pytest.raises(KubectlError, match="Forbidden"):
            plane.kubectl("get", "nodes", kubeconfig=config)


def _deployment(namespace: str, *, replicas: int) -> dict[str, Any]:
    labels = {"app": "many"}
    spread = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule"}
    spec = {**pod_spec(), "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": labels}}]}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"namespace": namespace, "name": "many"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def _crd() -> dict[str, Any]:
    rule = {
        "rule": "has(self.weight) == (self.enforcement == 'preferred')",
        "message": "weight needs enforcement: preferred",
    }
    enforcement = {
        "type": "string",
        "description": "Whether KV may cross.",
        "enum": ["required", "preferred"],
    }
    spec = {
        "type": "object",
        "required": ["enforcement"],
        "properties": {"enforcement": enforcement, "weight": {"type": "number"}},
        "x-kubernetes-validations": [rule],
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "links.kvrouter.test"},
        "spec": {
            "group": "kvrouter.test",
            "scope": "Namespaced",
            "names": {"kind": "Link", "plural": "links", "singular": "link"},
            "versions": [version],
        },
    }


def _rack_policy(namespace: str) -> list[dict[str, Any]]:
    """For the bindings in one namespace: every node is a parameter, and the one that is bound to counts."""
    name = f"rack-{namespace}"
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    bindings = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods/binding"],
    }
    is_its_node = f'params.metadata.name == object.target.name && "{RACK}" in params.metadata.labels'
    patch = (
        "variables.is_its_node ? ["
        'JSONPatch{op: "add", path: "/metadata/labels", value: has(object.metadata.labels)'
        " ? object.metadata.labels : {}},"
        f'JSONPatch{{op: "add", path: "/metadata/labels/" + jsonpatch.escapeKey("{RACK}"),'
        f' value: params.metadata.labels["{RACK}"]}}] : []'
    )
    policy = {
        "paramKind": {"apiVersion": "v1", "kind": "Node"},
        "matchConstraints": {"resourceRules": [bindings], "namespaceSelector": here},
        "variables": [{"name": "is_its_node", "expression": is_its_node}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "Never",
    }
    params = {"selector": {}, "parameterNotFoundAction": "Allow"}
    api_version = "admissionregistration.k8s.io/v1"
    return [
        {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, spec in (
            ("MutatingAdmissionPolicy", policy),
            ("MutatingAdmissionPolicyBinding", {"policyName": name, "paramRef": params}),
        )
    ]


async def _refusal(plane: ControlPlane, manifest: dict[str, Any]) -> str:
    """What is said of this object once it is refused: a refusal is in force a moment after it is written."""
    said: list[str] = []

    async def is_refused() -> bool:
        try:
            await asyncio.to_thread(plane.apply, manifest)
        except KubectlError as error:
            said.append(error.said)
        return bool(said)

    await eventually(is_refused)
    return said[0]


@asynccontextmanager
async def _door(plane: ControlPlane, dns_name: str) -> AsyncIterator[int]:
    """A webhook that refuses everything; gives its port."""

    async def refuse(request: web.Request) -> web.Response:
        review = await request.json()
        answer = {"uid": review["request"]["uid"], "allowed": False, "status": {"message": "no"}}
        reported = web.json_response({**review, "response": answer})
        reported.force_close()  # nobody waits for the end of TLS when the door is closed
        return reported

    certificate, key = plane.authority.for_server(dns_name).write(plane.folder / "keys", dns_name)
    app = web.Application()
    app.router.add_post("/validate", refuse)
    async with serving(app, tls=_server_tls(certificate, key)) as server:
        yield port_of(server)


def _server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def _webhook(plane: ControlPlane, namespace: str, target: dict[str, object]) -> dict[str, Any]:
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["configmaps"],
    }
    webhook = {
        "name": "door.kvrouter.test",
        "clientConfig": {**target, "caBundle": plane.authority.bundle()},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [rule],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"door-{namespace}"},
        "webhooks": [webhook],
    }
