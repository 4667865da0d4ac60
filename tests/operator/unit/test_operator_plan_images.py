"""Which image and resources a pod's containers have, and what rolls with them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import JsonValue

from kvrouter.core.errors import ConfigError
from kvrouter.operator.plan.defaults import read_resources
from tests.testing.planned_deployments import DEFAULTS, deployment, planned, templates


def test_engine_does_not_roll_while_its_init_container_keeps_the_old_image() -> None:
    engine: JsonValue = {"spec": {"containers": [{"name": "main", "image": "engine"}]}}
    policy: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}
    reported = deployment(policy=policy, pods={"decode": engine})
    old, new = replace(DEFAULTS, image="kvrouter:1"), replace(DEFAULTS, image="kvrouter:2")
    kept = replace(new, wait_image="kvrouter:1")
    was, becomes, stays = (
        templates(planned(reported, defaults=defaults))["decode"] for defaults in (old, new, kept)
    )
    assert was == stays
    assert was != becomes


POLICY: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}


def test_wait_container_and_frontend_have_cpu_and_memory_limits() -> None:
    pods = templates(planned(deployment(policy=POLICY)))
    for name, container in (("decode", "initContainers"), ("frontend", "containers")):
        (limits,) = [each["resources"]["limits"] for each in containers(pods, name, container)]
        assert limits.keys() == {"cpu", "memory"}


def test_user_resources_are_kept_and_another_image_is_warned_of() -> None:
    mine: JsonValue = {"requests": {"cpu": "100m"}}
    wait: dict[str, JsonValue] = {"name": "topology-wait", "resources": mine}
    engine: JsonValue = {
        "spec": {"containers": [{"name": "main", "image": "engine"}], "initContainers": [wait]}
    }
    frontend: JsonValue = {"spec": {"containers": [{"name": "main", "resources": mine}]}}
    plan = planned(deployment(policy=POLICY, pods={"decode": engine, "frontend": frontend}))
    (init,) = containers(templates(plan), "decode", "initContainers")
    assert (init["resources"], init["command"]) == (mine, ["kvrouter", "topology", "wait"])
    (main,) = containers(templates(plan), "frontend", "containers")
    assert main["resources"] == mine
    assert not plan.warnings
    wait["image"] = "another"
    assert planned(deployment(policy=POLICY, pods={"decode": engine})).warnings


def test_resources_of_a_flag_are_read_strictly() -> None:
    assert read_resources('{"limits": {"cpu": 2}}', "--wait-resources").manifest() == {"limits": {"cpu": 2}}
    for wrong in ('{"limit": {}}', "{", '{"limits": {"cpu": null}}'):
        with pytest.raises(ConfigError, match="--wait-resources"):
            read_resources(wrong, "--wait-resources")


def containers(pods: Mapping[str, Any], component: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pods[component]["spec"][kind]
    return found
