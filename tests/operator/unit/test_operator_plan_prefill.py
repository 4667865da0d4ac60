"""Prefill near the frontend: what the frontend's pods get for it, and what they get without it."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from kvrouter.app.frontend_place import read_place
from kvrouter.cli.worker.flags import topology_wait
from kvrouter.core.constraints import NearEnforcement
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.plan import plan
from kvrouter.settings.problems import dotted
from kvrouter.settings.sources import load_settings
from kvrouter.worker.topology import awaited
from tests.testing.planned_deployments import (
    DEFAULTS,
    FACTS,
    LEVELS,
    at,
    deployment,
    environment,
    has,
    planned,
    templates,
)

Fields = dict[str, JsonValue]
GONE = ClusterInfo(grove=Grove.PRESENT)
STRICT: Fields = {"enforcement": "required"}
LEVEL_AT = "spec.components[0].kvCacheTransferTopology.prefill.level"


def near(
    level: str = "rack", fields: Fields | None = None, pods: Fields | None = None
) -> DynamoGraphDeployment:
    of: Fields = {"level": "zone", "prefill": {"level": level, **(fields or {})}}
    return deployment(of_frontend=of, pods=pods)


def anywhere() -> DynamoGraphDeployment:
    return deployment(of_frontend={"level": "zone"})


def of_topology(*levels: Level) -> ClusterInfo:
    topology = ClusterTopology("gpu-fabric", levels)
    return ClusterInfo(grove=Grove.PRESENT, topologies={"gpu-fabric": topology})


def frontend(of: DynamoGraphDeployment, cluster_info: ClusterInfo = FACTS) -> JsonValue:
    return templates(planned(of, cluster_info))["frontend"]


def pods_of_user(**main: JsonValue) -> Fields:
    return {"frontend": {"spec": {"containers": [{"name": "main", **main}]}}}


def test_frontend_gets_no_place_without_prefill_near_it() -> None:
    template = frontend(anywhere())
    assert not has(at(template, "spec"), "volumes")
    assert not has(at(template, "spec"), "initContainers")
    assert not any("TOPOLOGY_ENABLED" in name or "PREFILL" in name for name in environment(template))
    assert not planned(anywhere()).places_frontends


@pytest.mark.parametrize(
    ("fields", "enforcement", "weight"),
    [
        ({}, NearEnforcement.PREFERRED, 0.6),
        ({"weight": 0.25}, NearEnforcement.PREFERRED, 0.25),
        ({"enforcement": "required"}, NearEnforcement.REQUIRED, 0.6),
    ],
)
async def test_frontend_reads_its_place_and_prefill_policy_from_the_plan(
    tmp_path: Path, fields: Fields, enforcement: NearEnforcement, weight: float
) -> None:
    own: JsonValue = [{"name": "DYN_TOPOLOGY_MOUNT_PATH", "value": str(tmp_path)}]
    template = frontend(near(fields=fields, pods=pods_of_user(env=own)))
    environ = environment(template)
    router = load_settings(flags={}, environ=environ, document=None).settings.router
    assert router.router_prefill_level == "rack"
    assert (router.router_prefill_enforcement, router.router_prefill_weight) == (enforcement, weight)
    assert at(template, "spec", "volumes") == [
        {
            "name": "topology-labels",
            "downwardAPI": {
                "items": [
                    {"path": "rack", "fieldRef": {"fieldPath": "metadata.labels['grove.io/topology.rack']"}}
                ]
            },
        }
    ]
    mount = {"name": "topology-labels", "mountPath": str(tmp_path), "readOnly": True}
    assert at(template, "spec", "containers", 0, "volumeMounts") == [mount]
    (tmp_path / "rack").write_text("r1")
    place = await read_place(router, environ)
    assert place.domains == {"rack": "r1"}


def test_init_container_waits_for_the_prefill_level() -> None:
    arguments = at(frontend(near()), "spec", "initContainers", 0, "args")
    assert isinstance(arguments, list)
    options = topology_wait.make_context("wait", [str(part) for part in arguments]).params
    wanted = awaited({}, mount_path=options["mount_path"], levels=options["levels"], labels=options["labels"])
    assert wanted.levels == ("rack",)
    assert wanted.label("rack") == "grove.io/topology.rack"
    raw: Fields = {"level": "zone", "label": "a.b/zone", "prefill": {"level": "zone"}}
    of_label = frontend(deployment(of_frontend=raw))
    assert "--label=zone=a.b/zone" in str(at(of_label, "spec", "initContainers", 0, "args"))


def test_prefill_level_rolls_only_frontends_and_other_levels_roll_none() -> None:
    before, after = templates(planned(anywhere())), templates(planned(near()))
    assert {name for name in before if before[name] != after[name]} == {"frontend"}
    wider = of_topology(*LEVELS, Level("host", "kubernetes.io/hostname"))
    assert frontend(near(), wider) == frontend(near())


def test_missing_preferred_prefill_level_is_ignored_with_a_warning() -> None:
    found = planned(near("host"))
    assert templates(found) == templates(planned(anywhere()))
    (warning,) = found.warnings
    assert dotted(warning.path) == LEVEL_AT
    assert warning.must == (
        "'host' is no level of clusterTopologyName gpu-fabric, which has zone, rack: prompts are prefilled "
        "anywhere"
    )


def test_missing_required_prefill_level_makes_new_frontends_wait() -> None:
    found = planned(near("host", STRICT))
    (warning,) = found.warnings
    assert dotted(warning.path) == LEVEL_AT
    assert warning.must.endswith(": new frontends wait for it")
    template = templates(found)["frontend"]
    assert environment(template)["KVROUTER_ROUTER_PREFILL_ENFORCEMENT"] == "required"
    later = frontend(near("host", STRICT), of_topology(*LEVELS, Level("host", "a.b/host")))
    assert template == later, "frontends were waiting for this very level"


@pytest.mark.parametrize("enforcement", ["preferred", "required"])
def test_missing_or_later_topology_rolls_no_frontend(enforcement: str) -> None:
    of = near(fields={"enforcement": enforcement})
    there = planned(of)
    assert plan(of, GONE, DEFAULTS, last_levels=LEVELS).manifests == there.manifests
    first = plan(of, GONE, DEFAULTS)
    assert templates(first)["frontend"] == templates(there)["frontend"]
    assert first.warnings == ()


def test_user_label_and_variable_of_the_prefill_level_give_way_with_a_warning() -> None:
    labels: JsonValue = {"grove.io/topology.rack": "forged", "team": "a"}
    main: Fields = {"name": "main", "env": [{"name": "KVROUTER_ROUTER_PREFILL_LEVEL", "value": "zone"}]}
    template: Fields = {"metadata": {"labels": labels}, "spec": {"containers": [main]}}
    found = planned(near(pods={"frontend": template}))
    assert [dotted(warning.path).rpartition("podTemplate.")[2] for warning in found.warnings] == [
        "metadata.labels.grove.io/topology.rack",
        "spec.containers[0].env[0]",
    ]
    written = templates(found)["frontend"]
    assert not has(at(written, "metadata", "labels"), "grove.io/topology.rack")
    assert environment(written)["KVROUTER_ROUTER_PREFILL_LEVEL"] == "rack"
    weighed = pods_of_user(env=[{"name": "KVROUTER_ROUTER_PREFILL_WEIGHT", "value": "0.9"}])
    assert environment(frontend(near(pods=weighed)))["KVROUTER_ROUTER_PREFILL_WEIGHT"] == "0.9"
    alone = deployment(of_frontend={"level": "zone"}, pods={"frontend": template})
    assert environment(frontend(alone))["KVROUTER_ROUTER_PREFILL_LEVEL"] == "zone"
