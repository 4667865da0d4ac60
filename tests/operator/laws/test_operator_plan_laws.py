"""Laws of plans: names that Kubernetes takes, references that resolve, one text for one deployment."""

import json
import re
import string
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.manifest import Manifest, fleet_name, object_name
from kvrouter.operator.plan.plan import Plan, plan
from tests.testing.planned_deployments import DEFAULTS, FACTS, TYPES, at, deployment, has

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PLAIN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
FORGED: JsonValue = {"grove.io/topology.zone": "forged", "kvrouter.dev/component": "x"}
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")

names = st.text(string.ascii_lowercase + string.digits + "-.", min_size=1, max_size=90)
cased_names = st.text(string.ascii_letters + string.digits + "-", min_size=1, max_size=90)
variables = st.sampled_from(
    (
        "DYN_TOPOLOGY_ENABLED",
        "DYN_TOPOLOGY_MOUNT_PATH",
        "DYN_KV_TRANSFER_DOMAIN",
        "KVROUTER_ROUTER_LINKS",
        "KVROUTER_KV_TRANSFER_WEIGHT",
        "KVROUTER_ROUTER_PREFILL_LEVEL",
        "NATS_SERVER",
        "DYN_HTTP_PORT",
    )
)
values = st.one_of(
    st.sampled_from(("", "true", "zone", "/etc/podinfo/topology", "8080")), st.text(max_size=5)
)
entries: st.SearchStrategy[JsonValue] = st.fixed_dictionaries({"name": variables, "value": values})
places = st.sampled_from(("/etc/dynamo/topology", "/etc/podinfo/topology/", "/models", "/x"))
volumes = st.sampled_from(("topology-labels", "models"))
mounts: st.SearchStrategy[JsonValue] = st.fixed_dictionaries({"name": volumes, "mountPath": places})


def by(key: str) -> Callable[[JsonValue], str]:
    return lambda found: str(at(found, key))


containers: st.SearchStrategy[JsonValue] = st.fixed_dictionaries(
    {"name": st.sampled_from(("main", "engine", "sidecar")), "image": st.just("example.com/engine:1")},
    optional={
        "env": st.lists(entries, max_size=4, unique_by=by("name")),
        "volumeMounts": st.lists(mounts, max_size=3, unique_by=by("mountPath")),
        "restartPolicy": st.just("Always"),
    },
)
specs: st.SearchStrategy[JsonValue] = st.fixed_dictionaries(
    {"containers": st.lists(containers, min_size=1, max_size=3, unique_by=by("name"))},
    optional={
        "initContainers": st.lists(containers, max_size=2, unique_by=by("name")),
        "volumes": st.just([{"name": "models", "emptyDir": {}}]),
    },
)
metadata: st.SearchStrategy[JsonValue] = st.sampled_from(({}, {"labels": FORGED}))
templates: st.SearchStrategy[JsonValue] = st.fixed_dictionaries({"spec": specs, "metadata": metadata})
pods = st.dictionaries(st.sampled_from(TYPES), templates, max_size=4)
sources = st.sampled_from(
    (("labelKey", "topology.kubernetes.io/zone"), ("clusterTopologyName", "gpu-fabric"))
)
enforcements = st.sampled_from(
    ({}, {"enforcement": "fallback"}, {"enforcement": "preferred", "preferredWeight": 0.5})
)
policies = st.builds(
    lambda source, enforcement, domain: {source[0]: source[1], "domain": domain, **enforcement},
    sources,
    enforcements,
    st.sampled_from(("zone", "rack")),
)
of_frontends = st.builds(
    lambda prefill, more: {"level": "zone", **more, **({} if prefill is None else {"prefill": prefill})},
    st.none()
    | st.builds(
        lambda level, enforcement: {"level": level, **enforcement},
        st.sampled_from(("zone", "rack", "host")),
        st.sampled_from(({}, {"enforcement": "required"}, {"weight": 0.3})),
    ),
    st.sampled_from(({}, {"label": "topology.kubernetes.io/zone"}, {"kvTransferWeight": 5})),
)
cluster_info = st.sampled_from((FACTS, ClusterInfo(), ClusterInfo(grove=Grove.UNREAD)))


@given(names, cased_names)
def test_object_names_are_dns_labels_and_fleet_names_are_plain_names(
    deployment_name: str, component: str
) -> None:
    assert DNS_LABEL.fullmatch(object_name(deployment_name, component))
    assert PLAIN_NAME.fullmatch(fleet_name(deployment_name[:63], component))


@given(st.lists(st.tuples(names, names), unique=True, max_size=30))
def test_no_two_deployments_share_a_fleet(pairs: list[tuple[str, str]]) -> None:
    assert len({fleet_name(*pair) for pair in pairs}) == len(pairs)


@given(pods, st.none() | policies, cluster_info)
def test_plan_of_any_deployment_is_consistent_and_repeatable(
    of_pods: dict[str, JsonValue], policy: dict[str, JsonValue] | None, known: ClusterInfo
) -> None:
    of = deployment(pods=of_pods, policy=policy)
    found = plan(of, known, DEFAULTS)
    assert found.problems == ()
    assert plan(of, known, DEFAULTS) == found
    assert json.dumps(plan(of, known, DEFAULTS).manifests) == json.dumps(found.manifests)
    for manifest in found.manifests:
        _check_metadata(manifest)
        if manifest["kind"] == "Deployment":
            _check_deployment(manifest, policy is not None, found)
        elif manifest["kind"] == "Service":
            _check_service(manifest, found)
    _check_accounts(found)


@given(pods, of_frontends, cluster_info)
def test_plan_with_a_frontend_policy_is_consistent_and_replans_the_same(
    of_pods: dict[str, JsonValue], policy: dict[str, JsonValue], known: ClusterInfo
) -> None:
    found = plan(deployment(pods=of_pods, of_frontend=policy), known, DEFAULTS)
    assert found.problems == ()
    for manifest in _deployments(found):
        _check_deployment(manifest, True, found)
    again: dict[str, JsonValue] = {
        kind: at(manifest, "spec", "template")
        for kind, manifest in zip(TYPES, _deployments(found), strict=True)
    }
    twice = plan(deployment(pods=again, of_frontend=policy), known, DEFAULTS)
    for before, after in zip(_deployments(found), _deployments(twice), strict=True):
        assert _as_sets(at(before, "spec", "template")) == _as_sets(at(after, "spec", "template"))


@given(pods, policies)
def test_template_copied_from_a_plan_is_planned_unchanged(
    of_pods: dict[str, JsonValue], policy: dict[str, JsonValue]
) -> None:
    """A template that was planned once, and that a user copied from the cluster, comes out unchanged."""
    once = plan(deployment(pods=of_pods, policy=policy), FACTS, DEFAULTS)
    again: dict[str, JsonValue] = {
        kind: at(manifest, "spec", "template")
        for kind, manifest in zip(TYPES, _deployments(once), strict=True)
    }
    twice = plan(deployment(pods=again, policy=policy), FACTS, DEFAULTS)
    for before, after in zip(_deployments(once), _deployments(twice), strict=True):
        assert _as_sets(at(before, "spec", "template")) == _as_sets(at(after, "spec", "template"))


def _check_metadata(manifest: Manifest) -> None:
    assert DNS_LABEL.fullmatch(str(at(manifest, "metadata", "name")))
    assert at(manifest, "metadata", "ownerReferences", 0, "uid") == "uid-1"
    labels = at(manifest, "metadata", "labels")
    assert isinstance(labels, dict)
    assert all(LABEL_VALUE.fullmatch(str(value)) for value in labels.values())


def _check_deployment(manifest: Manifest, has_policy: bool, found: Plan) -> None:
    selector = at(manifest, "spec", "selector", "matchLabels")
    labels = at(manifest, "spec", "template", "metadata", "labels")
    assert isinstance(selector, dict)
    assert isinstance(labels, dict)
    assert selector.items() <= labels.items()
    spec = at(manifest, "spec", "template", "spec")
    is_worker = labels["kvrouter.dev/component-type"] != "frontend"
    volumes = _named(spec, "volumes")
    ours = ("topology-labels" in volumes, "topology-wait" in _named(spec, "initContainers"))
    assert ours == (found.places_frontends or (has_policy and is_worker),) * 2
    for kind in ("initContainers", "containers"):
        for container in _entries(spec, kind):
            env = [str(at(entry, "name")) for entry in _entries(container, "env")]
            assert len(env) == len(set(env))
            places = [
                str(at(mount, "mountPath")).rstrip("/") for mount in _entries(container, "volumeMounts")
            ]
            assert len(places) == len(set(places))
            is_sidecar = is_worker and has(container, "restartPolicy")
            if ours[0] and (kind == "containers" or is_sidecar or _waits(container)):
                assert _named(container, "volumeMounts").count("topology-labels") == 1


def _check_service(manifest: Manifest, found: Plan) -> None:
    selector = at(manifest, "spec", "selector")
    assert isinstance(selector, dict)
    behind = [
        template
        for template in (at(other, "spec", "template") for other in _deployments(found))
        if selector.items() <= _labels(template).items()
    ]
    assert len(behind) == 1
    port = at(manifest, "spec", "ports", 0, "targetPort")
    containers = _entries(at(behind[0], "spec"), "containers")
    assert port in [at(entry, "containerPort") for c in containers for entry in _entries(c, "ports")]


def _check_accounts(found: Plan) -> None:
    """Each account is bound to a role that is there, and each pod that the operator gives one has such."""
    names = {
        kind: {str(at(each, "metadata", "name")) for each in found.manifests if each["kind"] == kind}
        for kind in ("ServiceAccount", "Role", "RoleBinding")
    }
    assert names["ServiceAccount"] == names["Role"] == names["RoleBinding"]
    for manifest in found.manifests:
        if manifest["kind"] == "RoleBinding":
            assert at(manifest, "roleRef", "name") == at(manifest, "subjects", 0, "name")
            assert at(manifest, "roleRef", "name") in names["Role"]
        if manifest["kind"] == "Deployment":
            spec = at(manifest, "spec", "template", "spec")
            assert at(spec, "serviceAccountName") in names["ServiceAccount"]


def _labels(template: JsonValue) -> dict[str, JsonValue]:
    labels = at(template, "metadata", "labels")
    assert isinstance(labels, dict)
    return labels


def _waits(container: JsonValue) -> bool:
    return at(container, "name") == "topology-wait"


def _deployments(found: Plan) -> list[Manifest]:
    return [manifest for manifest in found.manifests if manifest["kind"] == "Deployment"]


def _entries(found: JsonValue, key: str) -> list[JsonValue]:
    entries = at(found, key) if has(found, key) else []
    assert isinstance(entries, list)
    return entries


def _named(spec: JsonValue, key: str) -> list[str]:
    return [str(at(entry, "name")) for entry in _entries(spec, key)]


def _as_sets(template: JsonValue) -> str:
    """The template with its variables and mounts in one order: ours are written before or after a user's."""

    def ordered(found: JsonValue) -> JsonValue:
        if isinstance(found, dict):
            return {key: ordered(value) for key, value in sorted(found.items())}
        if isinstance(found, list):
            return sorted((ordered(entry) for entry in found), key=json.dumps)
        return found

    return json.dumps(ordered(template))
