"""From deployments to manifests: the whole of one, and what a policy changes and what not."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

from kvrouter.cli.worker.flags import topology_wait
from kvrouter.core.workers import Enforcement
from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.grove import Level
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.plan.defaults import PlanDefaults, SecretKey
from kvrouter.operator.plan.manifest import TEMPLATE_HASH, object_name
from kvrouter.operator.plan.plan import LEVELS_ANNOTATION, Plan, plan, read_levels
from kvrouter.settings.sources import load_settings
from kvrouter.settings.tree import AdminAccess
from kvrouter.worker import topology_env
from kvrouter.worker.topology import awaited
from tests.testing.planned_deployments import (
    DEFAULTS,
    FACTS,
    LEVELS,
    at,
    deployment,
    environment,
    has,
    of_kind,
    planned,
    templates,
)

GOLDEN = Path(__file__).parents[2] / "data" / "manifests" / "required.yaml"

REQUIRED: dict[str, JsonValue] = {"labelKey": "topology.kubernetes.io/zone", "domain": "zone"}
FALLBACK: dict[str, JsonValue] = {**REQUIRED, "enforcement": "fallback"}
PREFERRED: dict[str, JsonValue] = {**REQUIRED, "enforcement": "preferred", "preferredWeight": 0.85}
OF_FABRIC: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}


def pod(container: JsonValue, **spec: JsonValue) -> JsonValue:
    return {"spec": {"containers": [container], **spec}}


def test_plan_of_a_whole_deployment_matches_the_golden_file() -> None:
    written, *expected = yaml.safe_load_all(GOLDEN.read_text("utf-8"))
    of = read_deployment(written).deployment
    assert of is not None
    found = planned(of)
    assert list(found.manifests) == expected
    assert found.warnings == ()


# What a policy changes.


def test_plan_without_a_policy_has_nothing_of_topology() -> None:
    of = deployment()
    before = planned(of)
    text = str(before.manifests)
    assert "topology" not in text.lower()
    assert "DYN_ROUTER" not in text
    assert "KV_TRANSFER" not in text
    assert planned(of, ClusterInfo()) == before


@pytest.mark.parametrize(
    ("policy", "other", "rolled"),
    [
        (None, REQUIRED, {"frontend", "prefill", "decode", "worker"}),
        (REQUIRED, FALLBACK, {"frontend", "prefill", "worker"}),
        (REQUIRED, PREFERRED, {"frontend", "prefill", "worker"}),
        (PREFERRED, {**PREFERRED, "preferredWeight": 0.5}, {"prefill", "worker"}),
        (REQUIRED, OF_FABRIC, {"prefill", "decode", "worker"}),
        (OF_FABRIC, {**OF_FABRIC, "domain": "rack"}, {"frontend", "prefill", "decode", "worker"}),
    ],
)
def test_change_of_policy_rolls_only_the_components_that_it_concerns(
    policy: dict[str, JsonValue] | None, other: dict[str, JsonValue], rolled: set[str]
) -> None:
    before, after = planned(deployment(policy=policy)), planned(deployment(policy=other))
    was, becomes = templates(before), templates(after)
    assert {name for name in was if was[name] != becomes[name]} == rolled
    hashed, hashes = _hashes(before), _hashes(after)
    assert {name for name in hashed if hashed[name] != hashes[name]} == {f"llm-{name}" for name in rolled}


def _hashes(found: Plan) -> dict[str, JsonValue]:
    return {
        str(at(manifest, "metadata", "name")): at(manifest, "metadata", "annotations", TEMPLATE_HASH)
        for manifest in found.manifests
        if manifest["kind"] == "Deployment"
    }


def test_both_policy_spellings_plan_the_same_templates() -> None:
    graph = planned(deployment(policy=OF_FABRIC))
    assert templates(planned(deployment(of_frontend={"level": "zone"}))) == templates(graph)
    raw = planned(deployment(policy=REQUIRED))
    of_frontend: dict[str, JsonValue] = {"level": "zone", "label": "topology.kubernetes.io/zone"}
    assert templates(planned(deployment(of_frontend=of_frontend))) == templates(raw)


def test_raw_label_is_mounted_as_one_file() -> None:
    template = templates(planned(deployment(policy=REQUIRED)))["decode"]
    assert at(template, "spec", "volumes") == [
        {
            "name": "topology-labels",
            "downwardAPI": {
                "items": [
                    {
                        "path": "zone",
                        "fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"},
                    }
                ]
            },
        }
    ]


def test_missing_topology_rolls_nothing_while_its_levels_are_known() -> None:
    of = deployment(policy=OF_FABRIC)
    before = planned(of)
    annotation = at(
        of_kind(before, "Deployment")["llm-prefill"], "metadata", "annotations", LEVELS_ANNOTATION
    )
    assert annotation == "zone=topology.kubernetes.io/zone,rack=nvidia.com/rack"
    levels = read_levels(str(annotation))
    assert levels == LEVELS
    assert plan(of, ClusterInfo(), DEFAULTS, last_levels=levels).manifests == before.manifests
    alone = environment(templates(planned(of, ClusterInfo()))["prefill"])
    assert alone["DYN_TOPOLOGY_LEVELS"] == "zone"


@pytest.mark.parametrize("annotation", [None, "", ",", "zone", "=x", "zone=", "../zone=x", "Zone=x"])
def test_invalid_levels_annotation_reads_as_no_levels(annotation: str | None) -> None:
    assert read_levels(annotation) == ()
    assert read_levels(f"{annotation or ''},rack=r") == (Level("rack", "r"),)


# The other side of the contract: what workers, frontends and the init container read.


@pytest.mark.parametrize(
    ("policy", "enforcement", "weight"),
    [
        (OF_FABRIC, Enforcement.REQUIRED, None),
        ({**OF_FABRIC, "enforcement": "fallback"}, Enforcement.FALLBACK, None),
        (
            {**OF_FABRIC, "enforcement": "preferred", "preferredWeight": 0.85},
            Enforcement.PREFERRED,
            0.85,
        ),
    ],
)
def test_worker_reads_the_policy_from_its_planned_environment(
    policy: dict[str, JsonValue], enforcement: Enforcement, weight: float | None
) -> None:
    found = templates(planned(deployment(policy=policy)))
    for kind in ("prefill", "worker"):
        env = topology_env.parse_topology_env(environment(found[kind]))
        assert (env.awaited_domain, env.transfer_domain, env.levels) == ("zone", "zone", ("zone", "rack"))
        assert (env.enforcement, env.preferred_weight, env.warnings) == (enforcement, weight, ())
        assert str(env.mount_path) == "/etc/dynamo/topology"
    env = topology_env.parse_topology_env(environment(found["decode"]))
    assert (env.awaited_domain, env.levels, env.warnings) == ("zone", ("zone", "rack"), ())


@pytest.mark.parametrize(
    ("policy", "level", "mismatch"),
    [(REQUIRED, "zone", "fail"), (FALLBACK, "zone", "fallback"), (PREFERRED, None, "fail")],
)
def test_frontend_reads_the_policy_from_its_planned_environment(
    policy: dict[str, JsonValue], level: str | None, mismatch: str
) -> None:
    environ = environment(templates(planned(deployment(policy=policy)))["frontend"])
    assert environ["DYN_ROUTER_MODE"] == "kv"
    settings = load_settings(flags={}, environ=environ, document=None).settings
    assert settings.router.kv_transfer_topology_level == level
    assert settings.router.kv_transfer_mismatch_policy == mismatch
    assert settings.planes.namespace == "fleet_llm"
    assert (settings.frontend.http_host, settings.frontend.http_port) == ("0.0.0.0", 8000)


def test_wait_init_container_is_first_and_waits_for_the_policy_level() -> None:
    engine: JsonValue = {"name": "main", "image": "e"}
    pods: dict[str, JsonValue] = {"decode": pod(engine, initContainers=[{"name": "load", "image": "l"}])}
    template = templates(planned(deployment(policy=OF_FABRIC, pods=pods)))["decode"]
    waits, load = at(template, "spec", "initContainers", 0), at(template, "spec", "initContainers", 1)
    assert load == {"name": "load", "image": "l"}
    assert at(waits, "command") == ["kvrouter", "topology", "wait"]
    arguments = at(waits, "args")
    assert isinstance(arguments, list)
    options = topology_wait.make_context("wait", [str(part) for part in arguments]).params
    wanted = awaited({}, mount_path=options["mount_path"], levels=options["levels"], labels=options["labels"])
    assert (str(wanted.folder), wanted.levels) == (at(waits, "volumeMounts", 0, "mountPath"), ("zone",))
    assert wanted.label("zone") == "grove.io/topology.zone"
    assert options["timeout_s"] == DEFAULTS.wait_timeout_s


# What users wrote themselves.


def test_a_users_copies_of_the_policys_variables_are_overwritten_and_reported() -> None:
    env: list[JsonValue] = [
        {"name": "DYN_KV_TRANSFER_DOMAIN", "value": "rack"},
        {"name": "DYN_TOPOLOGY_ENABLED", "value": "true"},
        {"name": "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL", "value": "rack"},
        {"name": "OTHER", "value": "$(DYN_KV_TRANSFER_DOMAIN)"},
    ]
    pods: dict[str, JsonValue] = {
        "prefill": pod({"name": "main", "image": "e", "env": env}),
        "frontend": pod({"name": "main", "env": [{"name": "DYN_ROUTER_MODE", "value": "random"}]}),
    }
    found = planned(deployment(policy=REQUIRED, pods=pods))
    assert environment(templates(found)["prefill"])["DYN_KV_TRANSFER_DOMAIN"] == "zone"
    assert environment(templates(found)["frontend"])["DYN_ROUTER_MODE"] == "kv"
    ends = [(warning.path[-4:], warning.must.split(":")[0]) for warning in found.warnings]
    says = "follows from the policy of KV transfers, and"
    assert ends == [
        (("containers", 0, "env", 0), f"DYN_ROUTER_MODE {says} becomes 'kv'"),
        (("containers", 0, "env", 0), f"DYN_KV_TRANSFER_DOMAIN {says} becomes 'zone'"),
        (("containers", 0, "env", 2), f"DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL {says} is left out"),
    ]
    of_user = planned(deployment(pods=pods))
    assert environment(templates(of_user)["prefill"])["DYN_KV_TRANSFER_DOMAIN"] == "rack"
    assert of_user.warnings == ()


def test_user_parts_in_the_operators_places_are_left_out_and_warned_of() -> None:
    engine: JsonValue = {
        "name": "main",
        "image": "e",
        "volumeMounts": [
            {"name": "mine", "mountPath": "/etc/dynamo/topology/"},
            {"name": "topology-labels", "mountPath": "/elsewhere"},
            {"name": "mine", "mountPath": "/models"},
        ],
    }
    spec: dict[str, JsonValue] = {
        "containers": [engine],
        "initContainers": [{"name": "topology-wait", "image": "e"}],
        "volumes": [{"name": "topology-labels", "emptyDir": {}}, {"name": "mine", "emptyDir": {}}],
    }
    template: JsonValue = {
        "metadata": {"labels": {"grove.io/topology.zone": "forged", "a": "b"}},
        "spec": {**spec},
    }
    found = planned(deployment(policy=OF_FABRIC, pods={"decode": template}))
    assert len(found.warnings) == 4
    decode = templates(found)["decode"]
    assert has(at(decode, "metadata", "labels"), "a")
    assert not has(at(decode, "metadata", "labels"), "grove.io/topology.zone")
    assert at(decode, "spec", "containers", 0, "volumeMounts") == [
        {"name": "mine", "mountPath": "/models"},
        {"name": "topology-labels", "mountPath": "/etc/dynamo/topology", "readOnly": True},
    ]
    assert at(decode, "spec", "initContainers", 0, "image") == DEFAULTS.image


@pytest.mark.parametrize(
    ("stated", "is_taken"),
    [("/etc/podinfo/topology", True), ("relative", False), ("/", False), ("/a:b", False), ("", False)],
)
def test_topology_mount_path_of_a_container_counts_if_it_is_valid(stated: str, is_taken: bool) -> None:
    env: JsonValue = [{"name": "DYN_TOPOLOGY_MOUNT_PATH", "value": stated}]
    pods: dict[str, JsonValue] = {"decode": pod({"name": "main", "image": "e", "env": env})}
    found = planned(deployment(policy=REQUIRED, pods=pods))
    decode = templates(found)["decode"]
    path = stated if is_taken else "/etc/dynamo/topology"
    assert at(decode, "spec", "containers", 0, "volumeMounts", 0, "mountPath") == path
    assert environment(decode)["DYN_TOPOLOGY_MOUNT_PATH"] == path
    assert (found.warnings == ()) is is_taken


def test_policy_variables_go_to_lasting_containers_and_sidecars_alone() -> None:
    spec: JsonValue = {
        "spec": {
            "initContainers": [
                {"name": "once", "image": "o"},
                {"name": "sidecar", "image": "b", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "engine", "image": "e"}, {"name": "worker", "args": ["worker", "vllm"]}],
        }
    }
    template = templates(planned(deployment(policy=REQUIRED, pods={"decode": spec})))["decode"]
    reported = [
        at(template, "spec", kind, index, "name")
        for kind, count in (("initContainers", 3), ("containers", 2))
        for index in range(count)
        if "DYN_KV_TRANSFER_DOMAIN" in str(at(template, "spec", kind, index))
    ]
    assert reported == ["sidecar", "engine", "worker"]
    assert at(template, "spec", "containers", 1, "image") == DEFAULTS.image
    assert at(template, "spec", "containers", 1, "command") == ["kvrouter"]


def test_user_settings_of_planes_ports_probes_and_grace_time_win() -> None:
    mine: JsonValue = {
        "name": "main",
        "image": "mine",
        "env": [{"name": "NATS_SERVER", "value": "nats://mine"}, {"name": "DYN_HTTP_PORT", "value": "9000"}],
        "ports": [{"name": "web", "containerPort": 9000}],
        "readinessProbe": {"tcpSocket": {"port": 9000}},
    }
    found = planned(deployment(pods={"frontend": pod(mine, terminationGracePeriodSeconds=5)}))
    frontend = templates(found)["frontend"]
    assert environment(frontend)["NATS_SERVER"] == "nats://mine"
    assert at(frontend, "spec", "containers", 0, "ports") == [{"name": "web", "containerPort": 9000}]
    assert at(frontend, "spec", "containers", 0, "readinessProbe") == {"tcpSocket": {"port": 9000}}
    assert at(frontend, "spec", "containers", 0, "livenessProbe", "httpGet", "port") == 9000
    assert at(frontend, "spec", "terminationGracePeriodSeconds") == 5
    assert at(of_kind(found, "Service")["llm-frontend"], "spec", "ports", 0, "targetPort") == 9000


def test_service_links_are_off_unless_the_pod_template_enables_them() -> None:
    engine: JsonValue = {"name": "main", "image": "mine"}
    found = planned(deployment(pods={"worker": pod(engine, enableServiceLinks=True), "decode": pod(engine)}))
    links = {name: at(each, "spec", "enableServiceLinks") for name, each in templates(found).items()}
    assert links.pop("worker") is True
    assert set(links.values()) == {False}


def test_a_plane_token_is_read_from_a_secret() -> None:
    defaults = PlanDefaults(image="i", plane_token=SecretKey("planes", "token"))
    template = templates(planned(deployment(), defaults=defaults))["worker"]
    assert {
        "name": "KVROUTER_PLANE_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "planes", "key": "token"}},
    } in _env(template)


def test_admin_routes_are_closed_and_take_an_optional_token_secret() -> None:
    defaults = PlanDefaults(image="i", admin_token=SecretKey("admins", "word"))
    found = templates(planned(deployment(), defaults=defaults))
    env = _env(found["frontend"])
    assert {"name": "DYN_ADMIN_ROUTES", "value": "closed"} in env
    assert {
        "name": "KVROUTER_ADMIN_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "admins", "key": "word", "optional": True}},
    } in env
    assert not [each for each in _env(found["worker"]) if "ADMIN" in str(each)]
    settings = load_settings(flags={}, environ=environment(found["frontend"]), document=None).settings
    assert settings.frontend.admin_routes is AdminAccess.CLOSED


def test_planned_kvrouter_variables_are_those_an_older_image_knows() -> None:
    # kvrouter ends with a KVROUTER_ variable that it does not know: later settings are rendered as DYN_ ones.
    defaults = PlanDefaults(image="i", plane_token=SecretKey("planes", "token"))
    sidecar: JsonValue = {"spec": {"containers": [{"name": "main", "args": ["worker", "mock"]}]}}
    found = templates(planned(deployment(pods={"worker": sidecar}), defaults=defaults))
    names = {str(at(entry, "name")) for template in found.values() for entry in _env(template)}
    assert {name for name in names if name.startswith("KVROUTER_")} == {
        "KVROUTER_ADMIN_TOKEN",
        "KVROUTER_ADVERTISE_HOST",
        "KVROUTER_HEALTH_PORT",
        "KVROUTER_LISTEN_HOST",
        "KVROUTER_PLANE_TOKEN",
    }


def _env(template: JsonValue) -> list[JsonValue]:
    entries = at(template, "spec", "containers", 0, "env")
    assert isinstance(entries, list)
    return entries


# What cannot be planned.


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ({"spec": []}, "podTemplate.spec"),
        ({"metadata": {"labels": 3}}, "podTemplate.metadata.labels"),
        ({"spec": {"containers": {}}}, "podTemplate.spec.containers"),
        ({"spec": {"containers": ["main"]}}, "podTemplate.spec.containers"),
        ({"spec": {"containers": [{"env": {}}]}}, "podTemplate.spec.containers.0.env"),
        ({"spec": {"volumes": 1}}, "podTemplate.spec.volumes"),
        ({"spec": {"containers": []}}, "podTemplate.spec.containers"),
        ({"spec": {"containers": [{"name": "main"}]}}, "podTemplate.spec.containers.0"),
    ],
)
def test_template_of_a_wrong_form_plans_nothing_and_is_reported(template: JsonValue, where: str) -> None:
    found = plan(deployment(pods={"decode": template}), FACTS, DEFAULTS)
    assert found.manifests == ()
    assert [".".join(map(str, problem.path[3:])) for problem in found.problems] == [where]


def test_contradictory_policy_spellings_plan_nothing() -> None:
    of = deployment(policy=REQUIRED, of_frontend={"level": "rack"})
    found = plan(of, FACTS, DEFAULTS)
    assert found.manifests == ()
    assert len(found.problems) == 1


# Names.


def test_object_names_join_deployment_and_component_within_63_characters() -> None:
    assert object_name("llm", "Frontend") == "llm-frontend"
    long = object_name("d" * 40, "c" * 40)
    assert len(long) == 63
    assert long != object_name("d" * 40, "c" * 41)
